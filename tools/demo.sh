#!/usr/bin/env bash
# Set-up; small trained models of both families that speak and listen; then the mini_an4 recipe from recordings and transcripts
# to text and wav files, with tiny untrained checkpoints. Arguments go to egs/mini_an4/speechlm1/run.sh (--help shows them).
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

cat <<EOF

What follows: AN4's recordings and transcripts go through a recipe's stages as in ESPnet, with tiny untrained checkpoints: their
files mean nothing, everything around them is what a released checkpoint takes. Then two small models, trained on digits, spelled
words and short questions (egs/digits), speak, hear what they said, answer spoken questions and say AN4's transcripts.
EOF
code=0
cd "${recipe}"
# A demonstration decodes; it does not take over what an earlier one finished.
rm -rf exp/demo
./run.sh --expdir exp/demo "$@" || code=$?
[ "${code}" -le 1 ] || exit "${code}"
said=()
[ ! -r data/all/text ] || said=(--transcripts "${recipe}/data/all/text")
cd "${repo}/egs/digits/speechlm1"
./run.sh "${said[@]}" || code=1
cat <<EOF

Speech to listen to: ${PWD}/exp/demo/three_one_four.wav and those beside it
EOF
exit "${code}"
