#!/usr/bin/env bash
# AN4 (Carnegie Mellon University, see LICENSE.an4): recordings and transcripts out of downloads.tar.gz.
# Makes data/train, data/test, and data/all, which holds both; data/noisy and data/mixed are data/all to be enhanced.
set -euo pipefail

python=${1:-python3} # the Python that has espnet2_vllm
. ./path.sh

[ -r downloads.tar.gz ] || { echo "$0: no downloads.tar.gz in ${PWD}" 1>&2; exit 1; }
tar xzf downloads.tar.gz
"${python}" local/prepare_an4.py downloads/an4 data
"${python}" local/mix_an4.py data/all data
