# To be sourced from a recipe's directory: the environment that tools/setup.sh made, and what every recipe assumes.

ESPNET2_VLLM_ROOT=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../../.." && pwd -P)
export ESPNET2_VLLM_ROOT
export MAIN_ROOT=${MAIN_ROOT:-${ESPNET_ROOT:-${ESPNET2_VLLM_ROOT}}}

# An environment that is already active is the user's choice.
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x "${VENV:-${ESPNET2_VLLM_ROOT}/.venv}/bin/python3" ]; then
    export PATH="${VENV:-${ESPNET2_VLLM_ROOT}/.venv}/bin:${PATH}"
fi

export LC_ALL=C
export PYTHONIOENCODING=UTF-8
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
