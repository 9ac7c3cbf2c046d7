#!/usr/bin/env bash
# Scores results: word and character error rates of texts against references (jiwer), UTMOS of speech (VERSA, where it is installed).
# Ids that only one side has are counted and named. Exit code: 0 if everything was scored, 1 if not, 2 for options that cannot be used.
set -euo pipefail

usage() {
    cat <<END
Usage: tools/score.sh [--ref TEXT --hyp FILE [--task TASK]] [--wav DIRECTORY-OR-SCP [--keys FILE] [--asr MODEL]] [--python python3]
  --ref   references, a line each: id words
  --hyp   results: the same (merged text of ESPnet's recipe), results.json or dialogue.json
  --task  what stands in front of the ids of the results, as in codec_ssl_asr
  --wav   generated speech: a directory of wav files, or wav.scp; --keys: a file whose lines begin with the ids wanted
  --asr   with --wav and --ref: a recogniser of transformers (folder or tag of the hub), for word error rates of the speech
END
}

python=python3 ref="" hyp="" task="" wav="" keys="" asr=""
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --ref | --hyp | --task | --wav | --keys | --asr | --python)
            [ $# -ge 2 ] || { echo "score.sh: $1 needs a value" 1>&2; exit 2; }
            printf -v "${1#--}" '%s' "$2"
            shift 2
            ;;
        *) echo "score.sh: unknown option '$1' (--help)" 1>&2; exit 2 ;;
    esac
done
if [ -z "${ref}${hyp}${wav}" ]; then
    usage 1>&2
    exit 2
fi
code=0
if [ -n "${hyp}" ] || { [ -n "${ref}" ] && [ -z "${asr}" ]; }; then
    "${python}" -m espnet2_vllm.bin.score_text ${ref:+--ref "${ref}"} ${hyp:+--hyp "${hyp}"} ${task:+--task "${task}"} || code=$?
fi
if [ -n "${wav}" ]; then
    "${python}" -m espnet2_vllm.bin.score_speech --wavs "${wav}" ${keys:+--keys "${keys}"} ${asr:+--asr "${asr}" --ref "${ref}"} || code=$((code > $? ? code : $?))
fi
exit "${code}"
