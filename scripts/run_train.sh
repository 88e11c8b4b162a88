#!/usr/bin/env bash
# Trains. Finds a Python, installs what is missing (once), and execs scripts/launch.py.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as: sh SCRIPT
set -euo pipefail
# shellcheck source=scripts/lib/install.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib/install.sh"

usage() {
  printf '%s\n' \
    "usage: ./scripts/run_train.sh CONFIG [--section.key value | --section.key=value ...]" \
    "" \
    "Trains what CONFIG (a TOML file, such as configs/llama.toml) describes. The same command again resumes the run." \
    "The first launch installs what is missing into .venv; nothing else on the machine is changed." \
    "" \
    "  ./scripts/run_train.sh configs/llama.toml --training.steps 200" \
    "  NPROC=2 ./scripts/run_train.sh configs/llama.toml" \
    "  ./scripts/run_train.sh configs/llama3_8b.toml --explain     predicts memory and communication, and starts nothing;" \
    "                                                              options: --ranks N, --device cpu|cuda" \
    "" \
    "Keys of a section, with default, unit and legal values:  ./scripts/run_train.sh [CONFIG] --help SECTION  (all: docs/config.md)" \
    "" \
    "Environment:" \
    "  PYTHON             the Python to use, 3.$oldest to 3.$newest; default: the first of $pythons python3" \
    "  PHAROS_VENV        folder of the virtual environment, default .venv; nodes may share it" \
    "  TORCH_INDEX        index to install torch from; default: a CPU build without an NVIDIA driver, the CUDA build with one" \
    "  PHAROS_NO_INSTALL  1: install nothing; use PYTHON as it is (default: python3 of the PATH, not .venv), and print what it lacks" \
    "  NPROC (or NGPU)    ranks on this node; default: one per visible GPU, else 1" \
    "  NNODES             number of nodes, default 1; run the same command on each; a node waits 15 minutes for the others" \
    "  NODE_RANK          this node's rank, 0 to NNODES-1; default: in order of arrival, which may differ between launches" \
    "  RDZV_ENDPOINT      host:port of node 0, for the rendezvous" \
    "  LOG_RANK           ranks whose output is shown, such as 0,3, or all; default 0. <run>/logs (with replica groups:" \
    "                     <run>/groups/<id>) has that of every rank" \
    "  MAX_RESTARTS       restarts of failed ranks in any 24 h, default 0; none after exit code 2 or 6 runs in a row of less than 30 s" \
    "  STOP_GRACE         seconds that ranks have to save after SIGTERM or Ctrl-C, default 120; a second signal kills them;" \
    "                     not with one rank and no restarts, which is not supervised" \
    "  OMP_NUM_THREADS    threads per rank, default: cores of this machine divided by its ranks" \
    "" \
    "Exit code: 0 finished, or saved after SIGTERM or Ctrl-C; 2 bad input; 130, 143 stopped by Ctrl-C or SIGTERM while" \
    "no step was under way; 128 + n second stop signal n, with one rank; 1 other errors."
}

case ${!#} in --help | -h) usage && exit 0 ;; esac # before a section: launch.py lists its keys
if [ $# -eq 0 ]; then
  usage >&2
  exit 2
fi

config=$1
before_install() { check_file "$config"; } # launch.py checks the rest

use_python requirements.lock
exec "$python" "$root/scripts/launch.py" "$@"
