#!/usr/bin/env bash
# Random worlds on the vllm backend, compared with the pytorch backend; arguments as tools/fuzz.sh --help says.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "${repo}"
python=${VENV:-${repo}/.venv}/bin/python
[ -x "${python}" ] || python=python3
exec "${python}" -m tests.fuzz "$@"
