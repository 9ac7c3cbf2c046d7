#!/usr/bin/env bash
# The data, decoding and scoring stages of ESPnet's speechlm.sh, with espnet2_vllm as the decoder.
# Many options are only taken so that recipes of speechlm.sh run unchanged:
# shellcheck disable=SC2034
set -euo pipefail

log() {
    local fname=${BASH_SOURCE[1]##*/}
    echo -e "$(date '+%Y-%m-%dT%H:%M:%S') (${fname}:${BASH_LINENO[0]}:${FUNCNAME[1]}) $*"
}
die() { # die EXIT-CODE MESSAGE
    echo -e "$(basename "$0"): $2" 1>&2
    exit "$1"
}
min() { echo $(($1 < $2 ? $1 : $2)); }

SECONDS=0
template=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)

# General
stage=1              # First stage to run, by number or name.
stop_stage=10        # Last stage to run, by number or name.
skip_data_prep=false # Skip stages 1 to 5.
skip_eval=false      # Skip stages 9 and 10.
ngpu=1               # GPUs of a job, with gpu_inference; 1: as many as inference_args have a use for.
nj=32                # Taken for ESPnet's recipes; formatting here runs as one process.
inference_nj=        # Jobs of stage 9; empty: see the help.
gpu_inference=       # true, false, or empty: true where there is an NVIDIA GPU.
dumpdir=dump         # Where prepared data goes.
expdir=exp           # Where results go.
python=python3       # The Python that has espnet2_vllm.

# Data
family=opuslm        # opuslm (data.json) or bagpiper (dataset.json).
task=                # Task of the test sets.
data_name=           # Name of the corpus.
test_sets=           # Names of directories under data/.
test_jsons=          # data.json (bagpiper: dataset.json) files to decode; empty: those of stage 5.
local_data_opts=     # Options for local/data.sh.
fs=16000             # Sample rate that stage 2 writes, in Hz.
commands=            # Where names of recordings that end in | are run: scp, allow or refuse; empty: scp.
system_prompt=       # What the system says first in a dialogue, for stage 5.
question=            # bagpiper, task dialogue: what the user asks about each recording; empty: the user says the transcript.

# Model
tag=                 # Suffix of the experiment directory.
train_config=        # opuslm: names the tag, as in ESPnet. bagpiper: the checkpoint's train.yaml.
speechlm_exp=        # Experiment directory; empty: ${expdir}/speechlm_${tag}.
inference_model=     # Checkpoint in it; default valid.acc.ave.pth (bagpiper: mp_rank_00_model_states.pt).

# Decoding
backend=vllm         # vllm, pytorch, or espnet: ESPnet's own decoder.
inference_config=    # Decoding yaml.
inference_args=      # More options for the decoder; they win over the others.
inference_tag=       # Suffix of the result directory.
inference_dir=       # Result directory; empty: ${speechlm_exp}/${inference_tag}.
nbest=1              # Hypotheses an utterance.
test_unregistered_specifier= # bagpiper: task:name:dataset.json, as it stands; wins over test_jsons.
test_registered_specifier=   # bagpiper: task:name out of ESPNET_DATASET_REGISTRY.

# Scoring
scoring_args=        # Options for the scorer.

# Taken so that a recipe of speechlm.sh runs unchanged; without effect on decoding.
num_nodes=1 skip_train=true skip_upload=true skip_upload_hf=true skip_upload_hf_data=true
train_set="" valid_set="" train_jsons="" valid_jsons="" train_args="" token_list_dir="" audio_format=flac.ark
min_wav_duration=0.1 max_wav_duration=120
codec_choice=EnCodec codec_checkpoint_path=null codec_config_path=null codec_hf_model_tag=null codec_batch_size=3
ssl_choice=espnet_hubert ssl_feature_type=wavlm_large ssl_checkpoint_path=null ssl_kmeans_path=null ssl_nlayer=16
ssl_hf_model_tag=null ssl_batch_bins=4800000 subword_choice=sentencepiece subword_model=

help_message=$(cat <<EOF
Usage: $(basename "$0") --task TASK --data_name NAME --test_sets "SET..." --speechlm_exp DIR --inference_config YAML [OPTIONS]
   or: $(basename "$0") --stage inference --test_jsons "data.json..." --speechlm_exp DIR --inference_config YAML [OPTIONS]

Stages, by number or by name:
  1  data       local/data.sh                              -> data/<set>
  2  format     recordings as plain wav files              -> ${dumpdir}/audio_raw_<task>_<name>/<set>
  5  prepare    data.json (bagpiper: dataset.json)         -> ${dumpdir}/raw_<task>_<name>/<set>
  9  inference  decode every set                           -> <speechlm_exp>/<inference_tag>/<task>_<set>
 10  score      word and character error rates, where the results are text
Options (with their defaults):
  --stage ${stage}  --stop_stage ${stop_stage}  --skip_data_prep ${skip_data_prep}  --skip_eval ${skip_eval}
  --python ${python}  --dumpdir ${dumpdir}  --expdir ${expdir}
Data
  --family ${family}         opuslm or bagpiper
  --task, --data_name, --test_sets, --local_data_opts, --fs ${fs}, --system_prompt
  --commands              names of recordings that end in |: scp (default: run those of wav.scp), allow (of conversations too), refuse
  --question              bagpiper, task dialogue: what the user asks about each recording (audio question answering)
  --test_jsons            the files to decode, in place of those that stage 5 makes
  --ssl_checkpoint_path, --ssl_kmeans_path, --ssl_nlayer ${ssl_nlayer}   SSL model that tokenises the recordings of opuslm's tasks
Model
  --speechlm_exp          default \${expdir}/speechlm_\${tag}; --tag, --train_config name it as in ESPnet
  --inference_model       valid.acc.ave.pth; bagpiper: mp_rank_00_model_states.pt
  --train_config          bagpiper: default <speechlm_exp>/train.yaml
Decoding
  --backend ${backend}          vllm, pytorch, or espnet: ESPnet's own decoder, with the Python that ESPNET_PYTHON names
  --inference_config, --inference_args "--option value ...", --nbest ${nbest}
  --inference_tag, --inference_dir      result directory, named by ESPnet's rules if not given
  --inference_nj          jobs; default with vllm: one a GPU, or one, as an engine batches by itself; with pytorch: 32
  --gpu_inference         default: true where there is an NVIDIA GPU;  --ngpu ${ngpu} GPUs a job (1: as many as
                          --data_parallel_size, --tensor_parallel_size and --device in --inference_args take)
  --test_unregistered_specifier, --test_registered_specifier    bagpiper: what to decode, in ESPnet's form
Scoring
  --scoring_args
Other options of ESPnet's speechlm.sh are taken and have no effect here.
Exit code: 0 if every utterance has its result, 1 if not, 2 for options that cannot be used.
EOF
)

here_or_template() { if [ -r "./$1" ]; then echo "./$1"; else echo "${template}/$1"; fi; }

log "$0 $*"
. "$(here_or_template utils/parse_options.sh)"
[ $# -eq 0 ] || die 2 "no positional arguments are taken, got '$*' (--help)"
# Scripts of ESPnet's tree read variables that may not be set.
set +u
. "$(here_or_template path.sh)"
. "$(here_or_template cmd.sh)"
set -u
. "${template}/utils/resources.sh"

stage_number() { # stage_number OPTION VALUE
    case "$2" in
        data) echo 1 ;;
        format) echo 2 ;;
        prepare) echo 5 ;;
        inference | infer | decode) echo 9 ;;
        score) echo 10 ;;
        *)
            [[ $2 =~ ^[0-9]+$ ]] || die 2 "--$1 '$2': expected a number or one of data, format, prepare, inference, score"
            echo "$((10#$2))"
            ;;
    esac
}
stage=$(stage_number stage "${stage}")
stop_stage=$(stage_number stop_stage "${stop_stage}")
[ "${stage}" -le "${stop_stage}" ] || die 2 "--stage ${stage} comes after --stop_stage ${stop_stage}: nothing would run"
runs() { [ "${stage}" -le "$1" ] && [ "${stop_stage}" -ge "$1" ]; }

positive() { [[ $2 =~ ^[1-9][0-9]*$ ]] || die 2 "--$1 '$2': expected a number of at least 1"; }
one_of() { # one_of OPTION VALUE ALLOWED...
    local option=$1 value=$2
    shift 2
    case " $* " in *" ${value} "*) ;; *) die 2 "--${option} '${value}': expected one of $*" ;; esac
}
needed() { [ -n "$2" ] || die 2 "--$1 is needed for $3"; }
readable() { [ -r "$2" ] || die 1 "--$1: no such file: $2 (working directory: ${PWD})"; }

[[ ${dumpdir} != *[[:space:]]* ]] || die 2 "--dumpdir '${dumpdir}': sets are listed with blanks between them, so no path of one may have any"
one_of family "${family}" opuslm bagpiper
one_of backend "${backend}" vllm pytorch espnet
[ -z "${commands}" ] || one_of commands "${commands}" scp allow refuse
[ -z "${inference_nj}" ] || positive inference_nj "${inference_nj}"
positive nbest "${nbest}"
positive ngpu "${ngpu}"
gpus_of_a_job

case "${family}" in
    opuslm) json_name=data.json module=espnet2_vllm.bin.speechlm_inference_chat default_model=valid.acc.ave.pth ;;
    bagpiper) json_name=dataset.json module=espnet2_vllm.bin.inference default_model=mp_rank_00_model_states.pt ;;
esac
inference_model=${inference_model:-${default_model}}
recordings_of() { # recordings_of SET: names of the files of recordings that are read
    if [ "${family}" = bagpiper ]; then
        if [ "${task}" = audio_to_text ] || [ -n "${question}" ]; then echo wav.scp; fi
    else
        "${python}" -m espnet2_vllm.bin.prepare_data --family opuslm --task "${task}" --data-dir "data/$1" --show recordings
    fi
}
# A dialogue about recordings is another set than one of transcripts.
[ -z "${question}" ] || data_name+=_question
audio_dir=${dumpdir}/audio_raw_${task}_${data_name}
token_dir=${dumpdir}/token_raw_${task}_${data_name}
data_dir=${dumpdir}/raw_${task}_${data_name}

[ -n "${tag}" ] || [ -z "${train_config}" ] || tag=$(basename "${train_config}" .yaml)
[ -n "${speechlm_exp}" ] || [ -z "${tag}" ] || speechlm_exp=${expdir}/speechlm_${tag}

if [ -z "${inference_tag}" ]; then
    inference_tag=inference
    [ -z "${inference_config}" ] || inference_tag=$(basename "${inference_config}" .yaml)
    # ESPnet's rule, so that results lie where its own recipe looks for them
    [ -z "${inference_args}" ] || inference_tag+=$(echo "${inference_args}" | sed -e 's/--/_/g' -e 's/[ |=]//g')
    inference_tag+=_$(echo "${inference_model}" | sed -e 's/\//_/g' -e 's/\.[^.]*$//')
fi
result_root=${inference_dir:-${speechlm_exp}/${inference_tag}}

incomplete= # directories that lack recordings
if ! "${skip_data_prep}"; then
    if runs 1; then
        log "Stage 1 (data): data/{${test_sets// /,}}"
        [ -x local/data.sh ] || die 1 "stage data: no local/data.sh in ${PWD}"
        # shellcheck disable=SC2086
        local/data.sh ${local_data_opts}
    fi

    if runs 2 || runs 5; then
        needed task "${task}" "stages format and prepare"
        needed data_name "${data_name}" "stages format and prepare"
        needed test_sets "${test_sets}" "stages format and prepare"
    fi

    declare -A recordings=()
    if runs 2 || runs 5; then
        for dset in ${test_sets}; do
            files=$(recordings_of "${dset}") || exit $?
            recordings[${dset}]=${files}
            if runs 5 && [ "${family}" = opuslm ] && [ -n "${files}" ]; then
                [ "${ssl_checkpoint_path}" != null ] ||
                    die 2 "--ssl_checkpoint_path is needed to tokenise recordings (config.yaml beside it)"
                [ "${ssl_kmeans_path}" != null ] || die 2 "--ssl_kmeans_path is needed to tokenise recordings"
                needed speechlm_exp "${speechlm_exp}" "tokenising recordings (or --tag)"
            fi
        done
    fi

    going_on() { # going_on EXIT-CODE FOLDER FILE...: with the recordings that could be read, if that is all that went wrong
        local code=$1 folder=$2 name
        shift 2
        for name in "$@"; do [ "${code}" -eq 1 ] && [ -s "${folder}/${name}" ] || exit "${code}"; done
        log "Recordings of ${folder} are missing, see above; going on with the others"
        incomplete+="${incomplete:+, }${folder}"
    }

    if runs 2; then
        for dset in ${test_sets}; do
            if [ -n "${recordings[${dset}]}" ]; then
                log "Stage 2 (format): data/${dset} -> ${audio_dir}/${dset}"
                # What an earlier run left would look like this one's.
                for name in ${recordings[${dset}]}; do rm -f "${audio_dir}/${dset}/${name}"; done
                # shellcheck disable=SC2086
                "${python}" -m espnet2_vllm.bin.format_audio --data-dir "data/${dset}" \
                    --output-dir "${audio_dir}/${dset}" --name ${recordings[${dset}]} --fs "${fs}" ${commands:+--commands "${commands}"} ||
                    going_on $? "${audio_dir}/${dset}" ${recordings[${dset}]}
            else
                log "Stage 2 (format): ${task} reads no recordings: nothing to do for data/${dset}"
            fi
        done
    fi

    if runs 5; then
        for dset in ${test_sets}; do
            source_dir=data/${dset}
            if [ -n "${recordings[${dset}]}" ]; then source_dir=${audio_dir}/${dset}; fi
            if [ -n "${recordings[${dset}]}" ] && [ "${family}" = opuslm ]; then
                log "Stage 5 (tokenise): ${source_dir} -> ${token_dir}/${dset}"
                for name in ${recordings[${dset}]}; do rm -f "${token_dir}/${dset}/${name}"; done
                # shellcheck disable=SC2086
                "${python}" -m espnet2_vllm.bin.tokenize_audio --data-dir "${source_dir}" --output-dir "${token_dir}/${dset}" \
                    --name ${recordings[${dset}]} \
                    --train-config "${speechlm_exp}/config.yaml" --model-file "${speechlm_exp}/${inference_model}" \
                    ${inference_config:+--inference-config "${inference_config}"} \
                    --ssl-config "$(dirname "${ssl_checkpoint_path}")/config.yaml" --ssl-checkpoint "${ssl_checkpoint_path}" \
                    --ssl-kmeans "${ssl_kmeans_path}" --ssl-layer "${ssl_nlayer}" \
                    ${commands:+--commands "${commands}"} ||
                    going_on $? "${token_dir}/${dset}" ${recordings[${dset}]}
                source_dir=${token_dir}/${dset}
            fi
            log "Stage 5 (prepare): ${source_dir} -> ${data_dir}/${dset}/${json_name}"
            [ -d "${source_dir}" ] ||
                die 1 "stage prepare: no directory ${source_dir}; run stage data (and format) first, or correct --test_sets"
            "${python}" -m espnet2_vllm.bin.prepare_data --family "${family}" --task "${task}" --data-dir "${source_dir}" \
                --output-dir "${data_dir}/${dset}" --system-prompt "${system_prompt}" --question "${question}"
        done
    fi
else
    log "Skip the stages for data preparation"
fi

if [ -z "${test_jsons}" ] && [ -n "${test_sets}" ] && [ -n "${task}" ] && [ -n "${data_name}" ]; then
    for dset in ${test_sets}; do
        test_jsons+="${test_jsons:+ }${data_dir}/${dset}/${json_name}"
    done
fi

show_failed_logs() { # show_failed_logs LOG...
    local file
    for file in "$@"; do
        [ -f "${file}" ] || continue
        if ! tail -n 1 "${file}" | grep -q 'Ended (code 0)'; then
            echo "---- the end of ${file}:" 1>&2
            tail -n 20 "${file}" 1>&2
        fi
    done
}

merge() { # merge DIRECTORY JSON JOB-DIRECTORY...
    local dir=$1 json=$2
    shift 2
    "${python}" -m espnet2_vllm.bin.merge_outputs --family "${family}" --data-json "${json}" --nbest "${nbest}" \
        --output-dir "${dir}" "$@"
}

set_name() { # set_name JSON: the name of its folder, also where the path does not say it
    local folder
    folder=$(dirname "$1")
    case "$(basename "${folder}")" in . | ..) folder=$(cd "${folder}" && pwd) || return 1 ;; esac
    basename "${folder}"
}

declare -A decoded=() # the data.json of each directory that results go to
decode_opuslm() { # decode_opuslm DATA-JSON
    local json=$1 name task_name dir logdir jobs job failed=false outputs=()
    # Called where a failure is expected, so the shell does not stop at one by itself.
    name=$(set_name "${json}") || return 1
    task_name=$("${python}" -m espnet2_vllm.bin.split_data --data-json "${json}" --show task) || return 1
    dir=${result_root}/${task_name}_${name}
    logdir=${dir}/log
    if [ -n "${decoded[${dir}]:-}" ]; then
        log "${json} is not decoded: its results would replace those of ${decoded[${dir}]} in ${dir}; sets are named by their folders"
        return 1
    fi
    decoded[${dir}]=${json}
    mkdir -p "${logdir}" || return 1
    jobs=$("${python}" -m espnet2_vllm.bin.split_data --data-json "${json}" --nj "${_nj_wanted}" \
        --output-dir "${logdir}") || return 1
    hint "${jobs}"
    log "Decoding ${json} as ${task_name} with ${jobs} jobs, log: '${logdir}/speechlm_inference.*.log'"
    # Logs of an earlier run with more jobs would look like this one's.
    rm -f "${logdir}"/speechlm_inference.*.log
    # shellcheck disable=SC2086
    ${_cmd} --gpu "${_ngpu}" JOB=1:"${jobs}" "${logdir}"/speechlm_inference.JOB.log \
        "${python}" -m "${module}" \
        --ngpu "${_ngpu}" \
        --nbest "${nbest}" \
        --model_file "${speechlm_exp}/${inference_model}" \
        --train_config "${speechlm_exp}/config.yaml" \
        --output_dir "${logdir}"/output.JOB \
        ${inference_config:+--inference_config_file "${inference_config}"} \
        --data_path_and_name_and_type "${logdir}/split${jobs}/JOB/data.json,_,dataset_json" \
        --backend "${backend}" ${commands:+--commands "${commands}"} \
        ${inference_args} || failed=true
    if "${failed}"; then show_failed_logs "${logdir}"/speechlm_inference.*.log; fi
    for job in $(seq "${jobs}"); do outputs+=("${logdir}/output.${job}"); done
    # What other jobs finished is merged even if one failed.
    merge "${dir}" "${json}" "${outputs[@]}" || failed=true
    if "${failed}"; then
        log "Decoding ${json} FAILED, see above and ${logdir}/"
        return 1
    fi
    log "Results: ${dir}/"
}

decode_bagpiper() {
    local kind=unregistered specifiers=() named=() options=() sets=()
    local json specifier name set logdir total=0 count jobs workers=1 failed=false
    if [ -n "${test_registered_specifier}" ]; then
        [ -z "${test_unregistered_specifier}" ] ||
            die 2 "--test_registered_specifier and --test_unregistered_specifier exclude each other"
        kind=registered specifiers=("${test_registered_specifier}")
    elif [ -n "${test_unregistered_specifier}" ]; then
        specifiers=("${test_unregistered_specifier}")
    else
        needed test_jsons "${test_jsons}" "stage inference (or --test_sets with --data_name, or --test_unregistered_specifier)"
        needed task "${task}" "stage inference"
        for json in ${test_jsons}; do specifiers+=("${task}:$(set_name "${json}"):${json}"); done
    fi
    for specifier in "${specifiers[@]}"; do
        named+=("--${kind}" "${specifier}")
        options+=("--test-${kind}-specifier" "${specifier}")
    done
    # A specifier may hold blanks, and may stand for several.
    set=$("${python}" -m espnet2_vllm.bin.split_data "${named[@]}")
    mapfile -t sets <<<"${set}"
    for set in "${sets[@]}"; do
        IFS=$'\t' read -r _ name json <<<"${set}"
        [[ ${name} != */* ]] || die 2 "data set '${name}': its name is that of a directory, and cannot hold a /"
        readable test_jsons "${json}"
        count=$("${python}" -m espnet2_vllm.bin.split_data --data-json "${json}" --show size)
        total=$((total + count))
    done
    jobs=$(min "${_nj_wanted}" "${total}")
    [ "${jobs}" -eq "${_nj_wanted}" ] || log "${_nj_wanted} jobs asked for, ${total} utterances to share: ${jobs} jobs"
    hint "${jobs}"
    logdir=${result_root}/logs${task:+/${task}}
    mkdir -p "${logdir}"
    rm -f "${logdir}"/inference.*.log
    log "Decoding ${specifiers[*]} with ${jobs} jobs, log: '${logdir}/inference.*.log'"
    # shellcheck disable=SC2086
    ${_cmd} --gpu "${_ngpu}" JOB=1:"${jobs}" "${logdir}"/inference.JOB.log \
        "${python}" -m "${module}" \
        --train-config "${train_config:-${speechlm_exp}/train.yaml}" \
        --inference-config "${inference_config}" \
        --model-checkpoint "${speechlm_exp}/${inference_model}" \
        --output-dir "${result_root}" \
        "${options[@]}" \
        --num-workers 1 \
        --rank JOB \
        --world-size "${jobs}" \
        --backend "${backend}" ${commands:+--commands "${commands}"} \
        ${inference_args} || failed=true
    if "${failed}"; then show_failed_logs "${logdir}"/inference.*.log; fi
    if [[ ${inference_args} =~ .*--num[_-]workers[\ =]+([0-9]+) ]]; then workers=$((10#${BASH_REMATCH[1]})); fi
    for set in "${sets[@]}"; do
        local task_name dir rank outputs=()
        IFS=$'\t' read -r task_name name json <<<"${set}"
        dir=${result_root}/${task_name}_${name}
        for rank in $(seq 0 $((jobs * workers - 1))); do outputs+=("${dir}/inference_rank${rank}"); done
        merge "${dir}" "${json}" "${outputs[@]}" || failed=true
        log "Results: ${dir}/"
    done
    if "${failed}"; then
        log "Decoding FAILED, see above and ${logdir}/"
        return 1
    fi
}

if ! "${skip_eval}"; then
    if runs 9; then
        log "Stage 9 (inference): backend ${backend}, results under ${result_root:-?}"
        needed speechlm_exp "${speechlm_exp}" "stage inference (or --tag)"
        readable "inference_model (under --speechlm_exp)" "${speechlm_exp}/${inference_model}"
        [ -z "${inference_config}" ] || readable inference_config "${inference_config}"
        _cmd="" _ngpu=0 _nj_wanted=1
        choose_resources
        if [ "${family}" = bagpiper ]; then
            needed inference_config "${inference_config}" "stage inference with --family bagpiper"
            readable train_config "${train_config:-${speechlm_exp}/train.yaml}"
            decode_bagpiper
        else
            readable "speechlm_exp (its config.yaml)" "${speechlm_exp}/config.yaml"
            needed test_jsons "${test_jsons}" "stage inference (or --test_sets with --task and --data_name)"
            code=0
            for json in ${test_jsons}; do
                # A set that fails does not keep the others from being decoded.
                decode_opuslm "${json}" || code=1
            done
            [ "${code}" -eq 0 ] || exit 1
        fi
    fi

    if runs 10; then
        needed test_jsons "${test_jsons}" "stage score (or --test_sets with --task and --data_name)"
        for json in ${test_jsons}; do
            log "Stage 10 (score): ${json}"
            # shellcheck disable=SC2086
            "${python}" -m espnet2_vllm.bin.score_text --family "${family}" --data-json "${json}" \
                ${task:+--task "${task}"} --results-root "${result_root}" ${scoring_args}
        done
    fi
else
    log "Skip the stages for decoding and scoring"
fi

[ -z "${incomplete}" ] || die 1 "not every recording could be read: ${incomplete}; the log above names them"
log "Successfully finished. [elapsed=${SECONDS}s]"
