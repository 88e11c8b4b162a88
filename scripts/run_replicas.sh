#!/usr/bin/env bash
# Trains with several replica groups on this machine, one of which may die. Becomes scripts/replicas.py.
set -euo pipefail
# shellcheck source=scripts/lib/install.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib/install.sh"

usage() {
  printf '%s\n' \
    "usage: ./scripts/run_replicas.sh CONFIG --groups N [--open] [--section.key value | --section.key=value ...]" \
    "" \
    "Starts a lighthouse and N replica groups of what CONFIG describes, with fault_tolerance.enable = true. A group that dies is started" \
    "again, heals from the others and goes on; the others lose no step. Everything listens on this machine alone, with a token of its own." \
    "" \
    "  ./scripts/run_replicas.sh configs/llama.toml --groups 3" \
    "  ./scripts/run_replicas.sh configs/llama.toml --groups 3 --open       and the live page, in a browser" \
    "  NPROC=2 ./scripts/run_replicas.sh configs/llama.toml --groups 2      each group has two ranks" \
    "" \
    "To see it work: kill -9 one of the process numbers that it prints." \
    "On many machines: scripts/run_lighthouse.sh on one, then on each, with TORCHFT_LIGHTHOUSE, REPLICA_GROUP_ID and PHAROS_TOKEN set," \
    "scripts/run_train.sh CONFIG --fault_tolerance.enable true." \
    "" \
    "The visible GPUs are dealt out: NPROC to each group, else an equal number. Too few are refused, unless SHARE_GPUS=1." \
    "" \
    "Environment: as for run_train.sh; PHAROS_TOKEN, else a random one; MAX_RESTARTS  of each group in 24 h, default 100; STOP_GRACE." \
    "Exit code: 0 all groups finished, or saved after SIGTERM or Ctrl-C; 2 bad input; 1 the rest."
}

case " $* " in *" --help "* | *" -h "*) usage && exit 0 ;; esac
if [ $# -eq 0 ]; then
  usage >&2
  exit 2
fi

use_python requirements.lock requirements-lighthouse.lock
exec "$python" "$root/scripts/replicas.py" "$@"
