#!/usr/bin/env bash
# Set-up, then the mini_an4 recipe from recordings and transcripts to text and wav files, with tiny checkpoints of both
# families. Arguments go to egs/mini_an4/speechlm1/run.sh (--help shows them).
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
recipe=${repo}/egs/mini_an4/speechlm1
export VENV=${VENV:-${repo}/.venv}
case " $* " in
    *" --help "* | *" -h "*) cd "${recipe}"; exec ./run.sh --help ;;
esac
"${repo}/tools/setup.sh"
# This environment, whichever is active.
export PATH="${VENV}/bin:${PATH}"
# Tiny models need little room for their cache, and decode faster than anything can be compiled.
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} TORCH_COMPILE_DISABLE=${TORCH_COMPILE_DISABLE:-1}

cd "${recipe}"
# A demonstration decodes; it does not take over what an earlier one finished.
rm -rf exp/demo
./run.sh --expdir exp/demo "$@"
