# shellcheck shell=bash
# To be sourced from a recipe's directory: the environment that tools/setup.sh made, and what every recipe assumes.

ESPNET2_VLLM_ROOT=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../../.." && pwd -P)
export ESPNET2_VLLM_ROOT
export MAIN_ROOT=${MAIN_ROOT:-${ESPNET_ROOT:-${ESPNET2_VLLM_ROOT}}}

# A Python that has this package is the user's choice; a conda base or a system Python is not.
if [ -x "${VENV:-${ESPNET2_VLLM_ROOT}/.venv}/bin/python3" ] &&
    ! python3 -c 'import importlib.metadata as m; m.version("espnet2_vllm"); m.version("torch")' 2>/dev/null; then
    export PATH="${VENV:-${ESPNET2_VLLM_ROOT}/.venv}/bin:${PATH}"
fi

export LC_ALL=C
export PYTHONIOENCODING=UTF-8
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
