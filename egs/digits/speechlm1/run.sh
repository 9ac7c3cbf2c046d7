#!/usr/bin/env bash
# Small models of both families that speak and listen: digits, dates, spelled words, short commands and questions, in English.
# What is trained lies in models/; the default stage shows it. The other stages make it anew from nothing but espeak-ng.
set -euo pipefail

stage=demo            # First stage to run, by number or name: see the help.
stop_stage=           # Last stage to run; empty: the first one.
families="bagpiper opuslm" # Which models.
models=models         # Folder with codec, bagpiper and opuslm, to be shown and measured; exp: those that stages 2 to 4 made.
expdir=exp            # What is made goes here.
datadir=data          # Training and test speech.
backend=vllm          # vllm or pytorch: what decodes.
device=               # cpu or cuda, to train on; empty: what is there.
threads=2             # Of a CPU, in training.
jobs=                 # Processes that make data; empty: one a core.
train_utterances=200000 # Spoken in stage data, for training
test_utterances=1400   # and for tests, half of them digit strings.
codec_minutes=25      # Minutes of training, on a GPU: the codec,
lm_minutes=13         # and each model.
utterances=500        # Of stage evaluate.
transcripts=          # Kaldi text file that the demonstration says as well.
python=python3        # The Python that has espnet2_vllm.

# shellcheck disable=SC2034  # parse_options.sh prints it
help_message=$(cat <<EOF
Usage: ./run.sh [--stage ${stage}] [--stop_stage STAGE] [OPTIONS]

Stages, by number or by name:
  1  data       texts, spoken by espeak-ng in several voices -> ${datadir}/{train,answers,test}
  2  codec      training of the codec                        -> ${expdir}/codec
  3  codes      codes and log-mel units of all recordings    -> ${expdir}/{codes,units}
  4  train      training of the models                       -> ${expdir}/{bagpiper,opuslm}
  5  evaluate   word error rates of --models                 -> ${expdir}/evaluate_FAMILY
  6  demo       what they say and hear                       -> ${expdir}/demo
Options (with their defaults):
  --families "${families}"  --models ${models}  --backend ${backend}
  --expdir ${expdir}  --datadir ${datadir}  --python ${python}  --transcripts FILE
  --train_utterances ${train_utterances}, --test_utterances ${test_utterances}    of stage data
  --jobs N    processes that make data
  --device, --threads ${threads}, --codec_minutes ${codec_minutes}, --lm_minutes ${lm_minutes}    of training
  --utterances ${utterances}    of stage evaluate
Training from nothing, on one GPU: ./run.sh --stage data --stop_stage demo --models exp
On two processor cores, with more mistakes: the same with --train_utterances 13000 --codec_minutes 35 --lm_minutes 40
EOF
)
. utils/parse_options.sh
die() { echo "$0: $1" 1>&2; exit 2; }
[ $# -eq 0 ] || die "no positional arguments are taken, got '$*' (--help)"
. ./path.sh

number() { # number OPTION VALUE
    local names=(data codec codes train evaluate demo) i
    for i in "${!names[@]}"; do
        if [ "$2" = "${names[i]}" ] || [ "$2" = $((i + 1)) ]; then echo $((i + 1)); return; fi
    done
    die "--$1 '$2': expected one of ${names[*]}, or 1 to ${#names[@]}"
}
stage=$(number stage "${stage}")
stop_stage=$(number stop_stage "${stop_stage:-${stage}}")
[ "${stage}" -le "${stop_stage}" ] || die "--stage ${stage} comes after --stop_stage ${stop_stage}: nothing would run"
runs() { [ "${stage}" -le "$1" ] && [ "${stop_stage}" -ge "$1" ]; }
for family in ${families}; do
    case "${family}" in bagpiper | opuslm) ;; *) die "--families: '${family}' is none of bagpiper, opuslm" ;; esac
done
on=() by=()
[ -z "${device}" ] || on=(--device "${device}")
[ -z "${jobs}" ] || by=(--jobs "${jobs}")

if runs 1; then
    "${python}" local/synthesise.py "${datadir}" --train "${train_utterances}" --test "${test_utterances}" "${by[@]}"
fi
if runs 2; then
    "${python}" local/train_codec.py "${datadir}" "${expdir}/codec" --minutes "${codec_minutes}" --threads "${threads}" "${on[@]}"
fi
if runs 3; then
    "${python}" local/dump_codes.py "${expdir}/codec" "${datadir}" "${expdir}/codes" --threads "${threads}" "${on[@]}"
    "${python}" local/logmel_units.py "${datadir}" "${expdir}/units" "${by[@]}"
fi
if runs 4; then
    for family in ${families}; do
        units=()
        [ "${family}" = bagpiper ] || units=(--units "${expdir}"/units/{train,answers}.npz)
        "${python}" local/train_speechlm.py --config "conf/train_${family}.yaml" --data "${datadir}"/{train,answers} \
            --codes "${expdir}"/codes/{train,answers}.npz "${units[@]}" --codec "${expdir}/codec" --out "${expdir}/${family}" \
            --minutes "${lm_minutes}" --threads "${threads}" "${on[@]}"
        [ "${family}" = bagpiper ] || cp "${expdir}/units/centres.npy" "${expdir}/${family}/logmel_centres.npy"
    done
fi
if runs 5; then
    for family in ${families}; do
        "${python}" local/evaluate.py "${models}/${family}" "${expdir}/evaluate_${family}" --data "${datadir}/test" \
            --seen "${datadir}"/{train,answers}/text --backend "${backend}" \
            --utterances "${utterances}" --curve-utterances "$((utterances < 200 ? utterances : 200))"
    done
fi
if runs 6; then
    code=0
    for family in ${families}; do
        said=()
        [ -z "${transcripts}" ] || [ "${family}" = opuslm ] || said=(--transcripts "${transcripts}")
        "${python}" local/demo.py "${family}" "${expdir}/demo" --models "${models}" --backend "${backend}" "${said[@]}" || code=1
    done
    exit "${code}"
fi
