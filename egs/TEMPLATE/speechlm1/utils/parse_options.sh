# shellcheck shell=bash
# To be sourced: sets variables from the command line, by Kaldi's rules.
#   --some-name VALUE     sets some_name, which must have been set before
#   --config FILE         is sourced first, so that other options win over it
#   --help                prints ${help_message}
# A variable that holds true or false takes nothing else. Parsing ends at the first argument that is no option, or
# after --; what is left stays in $@. Usage errors exit with code 2.

_option_error() {
    echo "$0: $1" 1>&2
    exit 2
}

_option_value() { # _option_value OPTION NUMBER-OF-ARGUMENTS
    [ "$2" -ge 2 ] || _option_error "option $1 needs a value"
}

_index=1
while [ "${_index}" -lt $# ]; do
    if [ "${!_index}" = --config ]; then
        _next=$((_index + 1))
        [ -r "${!_next}" ] || _option_error "--config: cannot read '${!_next}'"
        . "${!_next}"
    fi
    _index=$((_index + 1))
done

while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h)
            echo "${help_message:-$0: no help message}"
            exit 0
            ;;
        --)
            shift
            break
            ;;
        --*=*) _option_error "write '${1%%=*} ${1#*=}' in place of '$1'" ;;
        --config)
            _option_value "$1" $#
            shift 2
            ;;
        --*)
            _name=${1#--}
            _name=${_name//-/_}
            [[ ${_name} =~ ^[a-zA-Z][a-zA-Z0-9_]*$ && -n ${!_name+set} ]] ||
                _option_error "unknown option $1 (--help lists the options)"
            _option_value "$1" $#
            if [[ ${!_name} =~ ^(true|false)$ && ! $2 =~ ^(true|false)$ ]]; then
                _option_error "$1 takes true or false, not '$2'"
            fi
            printf -v "${_name}" '%s' "$2"
            shift 2
            ;;
        *) break ;;
    esac
done
unset _index _next _name
