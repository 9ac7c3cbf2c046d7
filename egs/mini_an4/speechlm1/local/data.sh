#!/usr/bin/env bash
# AN4 (Carnegie Mellon University, see LICENSE.an4): recordings and transcripts out of downloads.tar.gz.
# Makes data/train, data/test, and data/all, which holds both.
set -euo pipefail

. ./path.sh

[ -r downloads.tar.gz ] || { echo "$0: no downloads.tar.gz in ${PWD}" 1>&2; exit 1; }
tar xzf downloads.tar.gz
python3 local/prepare_an4.py downloads/an4 data
