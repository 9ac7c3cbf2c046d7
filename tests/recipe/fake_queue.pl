#!/usr/bin/env bash
# A cluster's launcher by Kaldi's conventions, as `queue.pl` and `slurm.pl` are called: jobs in the background, each through a script
# that is read again by a shell, logs with accounting, and a failure of any is a failure of all. Only for tests.
set -euo pipefail
echo "$(basename "$0") $*" >>"${FAKE_QUEUE_LOG:?}"
while [[ ${1:-} == --* ]]; do shift 2; done
first=1 last=1 name=
if [[ ${1:-} =~ ^([A-Za-z]+)=([0-9]+):([0-9]+)$ ]]; then
    name=${BASH_REMATCH[1]} first=${BASH_REMATCH[2]} last=${BASH_REMATCH[3]}
    shift
fi
log=$1
shift
codes=()
for job in $(seq "${first}" "${last}"); do
    file=${log} line=
    for word in "$@"; do
        # As queue.pl does: words with blanks or quotes are quoted once, the line is read by a shell again.
        if [[ ${word} == *\"* ]]; then line+="'${word}' "; elif [[ ${word} =~ [[:space:]\'] ]] || [ -z "${word}" ]; then line+="\"${word}\" "; else line+="${word} "; fi
    done
    if [ -n "${name}" ]; then file=${file//${name}/${job}} line=${line//${name}/${job}}; fi
    mkdir -p "$(dirname "${file}")"
    {
        echo "# ${line}"
        echo "# Started at $(date)"
        echo "#"
        code=0
        bash -c "${line}" || code=$?
        echo "# Accounting: time=0 threads=1"
        echo "# Ended (code ${code}) at $(date), elapsed time 0 seconds"
    } >"${file}" 2>&1 </dev/null
    codes+=("$(tail -n 1 "${file}" | sed -e 's/.*code \([0-9]*\)).*/\1/')")
done
failed=0
for code in "${codes[@]}"; do [ "${code}" -eq 0 ] || failed=$((failed + 1)); done
if [ "${failed}" -gt 0 ]; then
    echo "$(basename "$0"): ${failed} / ${#codes[@]} failed, log is in ${log}" 1>&2
    exit 1
fi
