# shellcheck shell=bash
# To be sourced by speechlm_vllm.sh: how many jobs, on how many GPUs. Reads and sets its variables:
# shellcheck disable=SC2034,SC2154

count_gpus() { # of this machine, or those that CUDA_VISIBLE_DEVICES leaves
    "${template}/utils/run.py" --show-devices | wc -l
}

gpus_of_arguments() { # what engines and codec of a job take by --inference_args, where the last of an option counts
    local kind product=1
    for kind in data tensor; do
        if [[ ${inference_args} =~ .*${kind}[_-]parallel[_-]size[\ =]+([0-9]+) ]]; then
            product=$((product * 10#${BASH_REMATCH[1]}))
        fi
    done
    if [[ ${inference_args} =~ .*--device[\ =]+cuda:([0-9]+) ]] && [ "$((10#${BASH_REMATCH[1]}))" -ge "${product}" ]; then
        product=$((10#${BASH_REMATCH[1]} + 1))
    fi
    echo "${product}"
}

gpus_of_a_job() { # sets ngpu
    local wanted
    # Ray's GPUs are wherever it finds them.
    if [[ ${inference_args} == *distributed_executor_backend=ray* ]]; then return 0; fi
    wanted=$(gpus_of_arguments)
    [ "${wanted}" -ge 1 ] || wanted=1 # the decoder refuses such a size
    if [ "${wanted}" -gt 1 ] && [ "${ngpu}" -ne 1 ] && [ "${ngpu}" -ne "${wanted}" ]; then
        die 2 "--ngpu ${ngpu}: engine and codec take ${wanted} by --inference_args '${inference_args}'; leave --ngpu away"
    fi
    if [ "${wanted}" -eq 1 ] && [ "${ngpu}" -gt 1 ]; then
        log "--ngpu ${ngpu} is of the training, as in ESPnet: decoding takes 1, without a parallel size or device in --inference_args"
    fi
    ngpu=${wanted}
}

choose_resources() { # sets _cmd, _ngpu and _nj_wanted
    local gpus
    gpus=$(count_gpus)
    if [ -z "${gpu_inference}" ]; then
        gpu_inference=false
        [ "${gpus}" -eq 0 ] || gpu_inference=true
    fi
    one_of gpu_inference "${gpu_inference}" true false
    if "${gpu_inference}"; then
        _cmd=${cuda_cmd:?cmd.sh must set cuda_cmd} _ngpu=${ngpu}
    else
        _cmd=${decode_cmd:?cmd.sh must set decode_cmd} _ngpu=0
    fi
    if [ -n "${inference_nj}" ]; then
        _nj_wanted=${inference_nj}
    elif [ "${backend}" = vllm ]; then
        _nj_wanted=1
        if "${gpu_inference}" && [ "${gpus}" -ge "${ngpu}" ]; then _nj_wanted=$((gpus / ngpu)); fi
    else
        _nj_wanted=32
    fi
}

hint() { # hint JOBS: what a number of jobs means for vllm
    local gpus
    [ "${backend}" = vllm ] || return 0
    if [ "$1" -eq 1 ]; then
        log "One engine batches all utterances by itself"
    elif [[ ${_cmd} =~ (^|/)run\.(py|pl)( |$) ]]; then
        gpus=$(count_gpus)
        if ! "${gpu_inference}" || [ "$1" -gt $((gpus / ngpu)) ]; then
            log "Hint: $1 jobs are $1 engines on this machine, which has ${gpus} GPUs; with --inference_nj 1 one engine batches" \
                "all utterances, which is faster than jobs that share a device"
        fi
    fi
}
