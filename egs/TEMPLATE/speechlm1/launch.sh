#!/usr/bin/env bash
# The inference stage of ESPnet's launch.sh, infer.sh and run.sh for Bagpiper, with espnet2_vllm as the decoder.
set -euo pipefail

stage=infer          # 3, infer or inference; the stages before it are ESPnet's own.
stop_stage=infer     # The same.
exp_dir=             # Experiment directory.
train_config=        # The checkpoint's train.yaml; empty: ${exp_dir}/train.yaml.
inference_config=    # Decoding yaml.
inference_step=      # Step whose checkpoint is decoded with.
checkpoint_dir=      # The checkpoint itself: mp_rank_00_model_states.pt, a DCP folder or an exported file; wins over the step.
export_path=         # The same, as ESPnet's stage export names it.
inference_output_dir= # Where results go; empty: ${exp_dir}/inference/<config>_step_<step>.
inference_nj=        # Jobs; empty: one a GPU.
num_workers=1        # Taken; one engine replaces the workers.
test_unregistered_specifier= # task:name:dataset.json, several separated by blanks.
test_registered_specifier=   # task:name out of ESPNET_DATASET_REGISTRY.
backend=vllm         # vllm, pytorch or espnet.
python=python3       # The Python that has espnet2_vllm.
inference_args=      # More options for the decoder.

# shellcheck disable=SC2034  # parse_options.sh prints it
help_message=$(cat <<EOM
Usage: $(basename "$0") --stage infer --exp-dir DIR --inference-step N --inference-config YAML --test-unregistered-specifier "..."
   or: $(basename "$0") --stage 3 --checkpoint-dir PATH --train-config YAML --inference-config YAML --inference-output-dir DIR \\
           --test-registered-specifier "..."
The checkpoint of step N is <exp-dir>/checkpoints/step_N/global_stepN/mp_rank_00_model_states.pt, the results go to
<exp-dir>/inference/<config>_step_N. Further options: --train-config, --inference-nj, --backend, --python, --inference-args.
EOM
)
template=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
options=./utils/parse_options.sh
[ -r "${options}" ] || options=${template}/utils/parse_options.sh
. "${options}"
die() { echo "$(basename "$0"): $1" 1>&2; exit 2; }
[ $# -eq 0 ] || die "no positional arguments are taken, got '$*' (--help)"

for name in "${stage}" "${stop_stage}"; do
    case "${name}" in
        3 | infer | inference | decode) ;;
        1 | 2 | stats | train | export)
            die "stage ${name} belongs to ESPnet's own launcher; here is --stage 3 or infer (a checkpoint needs no export)"
            ;;
        *) die "--stage '${name}': expected 3 or infer" ;;
    esac
done
[[ ${num_workers} =~ ^[1-9][0-9]*$ ]] || die "--num-workers '${num_workers}': expected a number of at least 1"
[ -n "${inference_config}" ] || die "--inference-config is needed"
[ -n "${test_unregistered_specifier}${test_registered_specifier}" ] ||
    die "one of --test-unregistered-specifier and --test-registered-specifier is needed"

checkpoint=${checkpoint_dir:-${export_path}}
config_tag=$(basename "${inference_config%.*}")
if [ -z "${checkpoint}" ]; then
    [ -n "${exp_dir}" ] || die "--exp-dir is needed (or --checkpoint-dir)"
    [ -n "${inference_step}" ] || die "--inference-step is needed (or --checkpoint-dir)"
    checkpoint=${exp_dir}/checkpoints/step_${inference_step}/global_step${inference_step}/mp_rank_00_model_states.pt
fi
if [ -z "${inference_output_dir}" ]; then
    [ -n "${exp_dir}" ] || die "--inference-output-dir is needed (or --exp-dir)"
    inference_output_dir=${exp_dir}/inference/${config_tag}${inference_step:+_step_${inference_step}}
fi
[ -n "${train_config}" ] || train_config=${exp_dir:-$(dirname "${checkpoint}")}/train.yaml

words=(--family bagpiper --stage inference --stop_stage inference --speechlm_exp "$(dirname "${checkpoint}")"
    --inference_model "$(basename "${checkpoint}")" --train_config "${train_config}" --inference_config "${inference_config}"
    --inference_dir "${inference_output_dir}" --backend "${backend}" --python "${python}" --inference_args "${inference_args}"
    --test_unregistered_specifier "${test_unregistered_specifier}" --test_registered_specifier "${test_registered_specifier}")
[ -z "${inference_nj}" ] || words+=(--inference_nj "${inference_nj}")
exec "${template}/speechlm_vllm.sh" "${words[@]}"
