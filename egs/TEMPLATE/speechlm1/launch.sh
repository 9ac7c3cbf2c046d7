#!/usr/bin/env bash
# The inference stage of ESPnet's Bagpiper recipes (run.sh; launch.sh and infer.sh before 202609), with espnet2_vllm as the decoder.
set -euo pipefail

stage=infer          # infer, inference, or its number (5 in egs2/bagpiper, 3 elsewhere); the stages before it are ESPnet's own.
stop_stage=infer     # The same.
exp_dir=             # Experiment directory.
train_config=        # The checkpoint's train.yaml; empty: ${exp_dir}/train.yaml.
inference_config=    # Decoding yaml.
inference_step=      # Step whose checkpoint is decoded with.
checkpoint_dir=      # The checkpoint itself: mp_rank_00_model_states.pt, a DCP folder or an exported file; wins over the step.
export_path=         # The same, as ESPnet's stage export names it; empty, without a step: ${exp_dir}/export/model.pt.
inference_output_dir= # Where results go; empty: ${exp_dir}/inference/<config>_step_<step>.
inference_nj=        # Jobs; empty: one a GPU.
num_workers=1        # Taken; one engine replaces the workers.
test_unregistered_specifier= # task:name:dataset.json, as it stands.
test_specifier=              # The same, as run.sh also names it.
test_registered_specifier=   # task:name out of ESPNET_DATASET_REGISTRY.
backend=vllm         # vllm, pytorch or espnet.
python=python3       # The Python that has espnet2_vllm.
inference_args=      # More options for the decoder.

# shellcheck disable=SC2034  # parse_options.sh prints it
help_message=$(cat <<EOM
Usage: $(basename "$0") --exp-dir exp/sft --inference-config YAML --test-unregistered-specifier "task:name:path"
   or: $(basename "$0") --export-path FILE --train-config YAML --inference-config YAML --inference-output-dir DIR \\
           --test-registered-specifier "task:name"
The checkpoint is <exp-dir>/export/model.pt, or with --inference-step N that of the step,
<exp-dir>/checkpoints/step_N/global_stepN/mp_rank_00_model_states.pt; or name it: --checkpoint-dir, --export-path.
Results go to <exp-dir>/inference/<config>[_step_N]. Further options: --inference-nj, --backend, --python, --inference-args.
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
        3 | 5 | infer | inference | decode) ;;
        1 | 2 | 4 | stats | train | export)
            die "stage ${name} belongs to ESPnet's own recipe; here is --stage infer (or 3, 5; a checkpoint needs no export)"
            ;;
        *) die "--stage '${name}': expected infer, 3 or 5" ;;
    esac
done
[[ ${num_workers} =~ ^[1-9][0-9]*$ ]] || die "--num-workers '${num_workers}': expected a number of at least 1"
[ -n "${inference_config}" ] || die "--inference-config is needed"
test_unregistered_specifier=${test_unregistered_specifier:-${test_specifier}}
[ -n "${test_unregistered_specifier}${test_registered_specifier}" ] ||
    die "one of --test-unregistered-specifier and --test-registered-specifier is needed"

checkpoint=${checkpoint_dir:-${export_path}}
config_tag=$(basename "${inference_config%.*}")
if [ -z "${checkpoint}" ]; then
    [ -n "${exp_dir}" ] || die "--exp-dir is needed (or --export-path, --checkpoint-dir)"
    checkpoint=${exp_dir}/export/model.pt
    [ -z "${inference_step}" ] ||
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
