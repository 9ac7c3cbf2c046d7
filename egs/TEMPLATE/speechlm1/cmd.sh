# shellcheck shell=bash
# How jobs are started. Change `cmd_backend` to use a cluster; its script (queue.pl, slurm.pl, pbs.pl, ssh.pl) is that
# of the ESPnet tree, which ESPNET_ROOT (or MAIN_ROOT) names or in which this recipe lies, with its settings in conf/.
#   ${decode_cmd} --gpu 1 JOB=1:4 LOG.JOB.log COMMAND --option JOB

cmd_backend=${cmd_backend:-local}

_recipe_utils=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/utils
if [ -x utils/run.py ]; then _recipe_utils=utils; fi

if [ "${cmd_backend}" = local ]; then
    _launcher=${_recipe_utils}/run.py
else
    _launcher=
    for _dir in utils ${MAIN_ROOT:-${ESPNET_ROOT:-../../..}}/{egs2/TEMPLATE/asr1/utils,tools/kaldi/egs/wsj/s5/utils,utils}; do
        if [ -x "${_dir}/${cmd_backend}.pl" ]; then _launcher=${_dir}/${cmd_backend}.pl; break; fi
    done
    if [ -z "${_launcher}" ]; then
        echo "cmd.sh: cmd_backend=${cmd_backend}: no ${cmd_backend}.pl in utils/ or in an ESPnet tree (set ESPNET_ROOT);" \
            "cmd_backend=local needs none" 1>&2
        return 1
    fi
    if [ -f "conf/${cmd_backend}.conf" ]; then _launcher="${_launcher} --config conf/${cmd_backend}.conf"; fi
fi
export train_cmd="${_launcher}"
export cuda_cmd="${_launcher}"
export decode_cmd="${_launcher}"
unset _recipe_utils _launcher _dir
