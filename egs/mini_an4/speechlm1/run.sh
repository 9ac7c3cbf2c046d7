#!/usr/bin/env bash
# AN4's recordings and transcripts through tiny checkpoints of both families: text to audio, text to text, recognition, and
# questions about recordings.
# The weights are random, so the results mean nothing; everything around them is what a released checkpoint takes.
set -euo pipefail

stage=data            # First stage to run: data, format, prepare, inference, score, or their numbers.
stop_stage=inference  # Last stage to run.
# What to run, out of these and opuslm_asr, opuslm_voices (speaker prompts), opuslm_se (noise), opuslm_tse (two speakers at once).
runs="opuslm_tts opuslm_dialogue bagpiper_tts bagpiper_dialogue bagpiper_asr bagpiper_answer"
test_sets=all         # Sets to decode: train (5 utterances), test (2) or all (7); opuslm_se and opuslm_tse have their own.
backend=vllm          # vllm or pytorch.
inference_nj=1        # Jobs of a run.
nbest=1               # Hypotheses an utterance.
inference_args=       # More options for the decoders.
expdir=exp            # Where checkpoints and results go.
golden_root=../../../tests/golden # Where the tiny checkpoints lie.
python=python3        # The Python that has espnet2_vllm.

# shellcheck disable=SC2034  # parse_options.sh prints it
help_message=$(cat <<EOF
Usage: ./run.sh [--stage ${stage}] [--stop_stage ${stop_stage}] [--runs "${runs}"]
  [--test_sets ${test_sets}] [--backend ${backend}] [--inference_nj ${inference_nj}] [--nbest ${nbest}]
  [--inference_args "..."] [--expdir ${expdir}] [--golden_root ${golden_root}]
  [--python ${python}]
For a checkpoint of your own: ./speechlm_vllm.sh --help
EOF
)
. utils/parse_options.sh
[ $# -eq 0 ] || { echo "$0: no positional arguments are taken, got '$*' (--help)" 1>&2; exit 2; }
[[ ${inference_nj} =~ ^[1-9][0-9]*$ ]] || { echo "$0: --inference_nj '${inference_nj}': expected a number of at least 1" 1>&2; exit 2; }
. ./path.sh

copy_checkpoint() { # copy_checkpoint SOURCE TARGET FILE...
    local source=$1 target=$2 file
    shift 2
    mkdir -p "${target}"
    for file in "$@"; do
        if [ ! -e "${source}/${file}" ]; then
            echo "$0: no ${file} in ${source}; --golden_root names the directory of the tiny checkpoints" 1>&2
            exit 1
        fi
        # A copy, so that what is made beside a checkpoint does not end up among the references of the tests.
        [ -e "${target}/${file}" ] || cp -rL "${source}/${file}" "${target}/${file}"
    done
    chmod -R u+w "${target}"
}

opuslm() { # opuslm TASK [OPTION...]
    local task=$1
    shift
    copy_checkpoint "${golden_root}/opuslm/tiny-llama" "${expdir}/opuslm_tiny" config.yaml model.pth hf_backbone codec
    recipe --family opuslm --task "${task}" --speechlm_exp "${expdir}/opuslm_tiny" --inference_model model.pth \
        --inference_config conf/decode_opuslm.yaml --inference_dir "${expdir}/opuslm_tiny/results" "$@"
    add_results "${expdir}/opuslm_tiny/results/${task}"
}

opuslm_from_sound() { # opuslm_from_sound TASK [OPTION...]: recordings go in as units of a tiny SSL model and codes
    local task=$1 ssl=${expdir}/ssl_tiny
    shift
    [ -e "${ssl}/kmeans.npy" ] || "${python}" local/make_tiny_ssl.py "${ssl}"
    opuslm "${task}" --ssl_checkpoint_path "${ssl}/model.pth" --ssl_kmeans_path "${ssl}/kmeans.npy" --ssl_nlayer 2 "$@"
}

add_results() { # add_results ROOT: of the sets that the last run decoded
    local set
    for set in ${sets}; do result_dirs+=("$1_${set}"); done
}

bagpiper() { # bagpiper TASK CONFIG [OPTION...]
    copy_checkpoint "${golden_root}/bagpiper/qwen3-s8-cb64" "${expdir}/bagpiper_tiny" \
        train.yaml mp_rank_00_model_states.pt backbone codec
    bagpiper_with "${expdir}/bagpiper_tiny" "$@"
}

hearing() { # hearing TASK CONFIG [OPTION...]: with the checkpoint that has an audio encoder
    copy_checkpoint "${golden_root}/bagpiper/qwen3-s4-cb32-contaudio" "${expdir}/bagpiper_hearing_tiny" \
        train.yaml mp_rank_00_model_states.pt backbone codec Qwen
    bagpiper_with "${expdir}/bagpiper_hearing_tiny" "$@"
}

bagpiper_with() { # bagpiper_with CHECKPOINT TASK CONFIG [OPTION...]
    local checkpoint=$1 task=$2 config=$3
    shift 3
    recipe --family bagpiper --task "${task}" --speechlm_exp "${checkpoint}" --inference_config "conf/${config}.yaml" \
        --inference_dir "${checkpoint}/results" "$@"
    add_results "${checkpoint}/results/${task}"
}

recipe() {
    ./speechlm_vllm.sh --stage "${stage}" --stop_stage "${stop_stage}" --data_name mini_an4 --test_sets "${sets}" \
        --backend "${backend}" --inference_nj "${inference_nj}" --nbest "${nbest}" --inference_args "${inference_args}" \
        --expdir "${expdir}" --python "${python}" --local_data_opts "${python}" "$@" || code=$?
    # An utterance that failed keeps no other run from being decoded; a wrong option does.
    [ "${code}" -le 1 ] || exit "${code}"
    # The corpus is the same for every run.
    case "${stage}" in data | 1) stage=format ;; esac
}

SECONDS=0
code=0
result_dirs=()
system_prompt="repeat what the user says"
for run in ${runs}; do
    sets=${test_sets}
    case "${run}" in
        opuslm_tts) opuslm codec_ssl_plain_tts ;;
        opuslm_dialogue) opuslm text_dialogue --system_prompt "${system_prompt}" ;;
        opuslm_asr) opuslm_from_sound codec_ssl_asr ;;
        opuslm_voices) opuslm_from_sound codec_ssl_tts ;;
        opuslm_se) sets=noisy && opuslm_from_sound codec_ssl_se ;;
        opuslm_tse) sets=mixed && opuslm_from_sound codec_ssl_tse ;;
        bagpiper_tts) bagpiper text_to_audio inference_audio ;;
        bagpiper_dialogue) bagpiper dialogue inference_text --system_prompt "${system_prompt}" ;;
        bagpiper_asr) hearing audio_to_text inference_text ;;
        bagpiper_answer) hearing dialogue inference_text --question "what does the speaker say?" ;;
        *)
            echo "$0: --runs: no run named '${run}'; expected opuslm_tts, opuslm_dialogue, opuslm_asr," \
                "opuslm_voices, opuslm_se, opuslm_tse, bagpiper_tts, bagpiper_dialogue, bagpiper_asr or bagpiper_answer" 1>&2
            exit 2
            ;;
    esac
done
"${python}" local/summary.py --seconds "${SECONDS}" "${result_dirs[@]}" || code=1
exit "${code}"
