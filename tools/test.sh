#!/usr/bin/env bash
# Set-up, lint, and the tests: fast ones first. Arguments go to pytest, which then runs once with them.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "${repo}"
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    echo "Usage: tools/test.sh [PYTEST ARGUMENTS]   (VENV: the environment, default .venv)"
    exit 0
fi
export VENV=${VENV:-${repo}/.venv}
tools/setup.sh
export PATH="${VENV}/bin:${PATH}"

# vLLM in this process and with little cache: the tests' models are tiny and share one machine. Compiling the sampler that
# vLLM brings, which these models do not use, would take longer than most tests.
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 TORCH_COMPILE_DISABLE=${TORCH_COMPILE_DISABLE:-1}

ruff check .
ruff format --check .

if [ $# -gt 0 ]; then
    exec python3 -m pytest "$@"
fi
python3 -m pytest -m "not slow"
if grep -rq --include='*.py' 'mark\.slow' tests; then
    python3 -m pytest -m slow
fi
