#!/usr/bin/env bash
# Kills a decode with SIGKILL at 20 random moments, starts it again each time, and compares the results with an undisturbed run.
# tools/kill_test.sh --help; tools/kill_test.sh --kills 20 -- COMMAND... kills another decode, whose output directory is OUT.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${VENV:-${repo}/.venv}/bin/python
[ -x "${python}" ] || python=python3
export PYTHONPATH=${repo}${PYTHONPATH:+:${PYTHONPATH}}
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 TORCH_COMPILE_DISABLE=${TORCH_COMPILE_DISABLE:-1}
exec "${python}" "${repo}/tests/bin/killing.py" "$@"
