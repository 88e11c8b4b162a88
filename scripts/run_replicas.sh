#!/usr/bin/env bash
# Trains with several replica groups on this machine, any of which may die. Execs scripts/replicas.py.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as: sh SCRIPT
set -euo pipefail
# shellcheck source=scripts/lib/install.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib/install.sh"

usage() {
  printf '%s\n' \
    "usage: ./scripts/run_replicas.sh CONFIG --groups N [--open] [--section.key value | --section.key=value ...]" \
    "" \
    "Starts a lighthouse and N replica groups with CONFIG and fault_tolerance.enable = true. A group that dies is restarted, heals from" \
    "the others and continues; the others lose no step. All ports are reachable only from this machine, and require the job's token." \
    "" \
    "  ./scripts/run_replicas.sh configs/llama.toml --groups 3" \
    "  ./scripts/run_replicas.sh configs/llama.toml --groups 3 --open       opens the dashboard in a browser" \
    "  NPROC=2 ./scripts/run_replicas.sh configs/llama.toml --groups 2      each group has two ranks" \
    "" \
    "To try it: kill -9 one of the pids that it prints." \
    "On several machines: scripts/run_lighthouse.sh on one, then on each, with TORCHFT_LIGHTHOUSE, REPLICA_GROUP_ID, PHAROS_TOKEN_FILE" \
    "and MAX_RESTARTS=100 set, scripts/run_train.sh CONFIG --fault_tolerance.enable true." \
    "" \
    "Each group gets NPROC of the visible GPUs, default an equal share." \
    "" \
    "Environment, beside that of run_train.sh:" \
    "  MAX_RESTARTS       restarts of each group in any 24 h, default 100" \
    "  PHAROS_TOKEN       the job's token, default random" \
    "  SHARE_GPUS         1: groups may share GPUs, for trials; default: too few GPUs are an error" \
    "  STOP_GRACE         seconds that the groups have to save after SIGTERM or Ctrl-C, default 120; a second signal, 2 s later or" \
    "                     more, kills them" \
    "" \
    "Exit code: 0 all groups finished, or saved after SIGTERM or Ctrl-C; 2 bad input; 130, 143 stopped by Ctrl-C or SIGTERM while" \
    "no step was under way; 1 other errors."
}

for word in "$@"; do
  case $word in --help | -h) usage && exit 0 ;; esac
done
if [ $# -eq 0 ]; then
  usage >&2
  exit 2
fi

arguments=("$@")
before_install() { # an error in the settings should not cost the installation of the lighthouse
  check_file "${arguments[0]}"
  ! is_complete requirements.lock || "$python" "$root/scripts/replicas.py" --check "${arguments[@]}" || exit
}

use_python requirements.lock requirements-lighthouse.lock
exec "$python" "$root/scripts/replicas.py" "$@"
