#!/usr/bin/env bash
# Starts a lighthouse, the job's server that forms quorums of replica groups. Execs ft/rpc/lighthouse_main.py.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as: sh SCRIPT
set -euo pipefail
# shellcheck source=scripts/lib/install.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib/install.sh"

usage() {
  cat <<END
usage: ./scripts/run_lighthouse.sh --min_replicas N [flags]

  ./scripts/run_lighthouse.sh --min_replicas 2                              reachable only from this machine
  ./scripts/run_lighthouse.sh --min_replicas 2 --token_file token           reachable with the token

$(sed -n '/^  --/p' "$root/ft/rpc/lighthouse_flags.py")

Uses .venv if that has what a lighthouse needs, else creates .venv-lighthouse, without torch.
Environment: PYTHON, PHAROS_VENV, PHAROS_NO_INSTALL, as in run_train.sh.
Exit code: 0 after SIGTERM or Ctrl-C; 128 + n after a second signal n, which ends it at once; 2 bad input; 1 other errors.
END
}

case " $* " in *" --help "* | *" -h "*) usage && exit 0 ;; esac

# Overrides of install.sh: the environment has no torch.
unset TORCH_INDEX
install_torch() { torch_from=nowhere; }
try_it() { run_logged "$python" -Ic "import aiohttp.web, google.protobuf.timestamp_pb2, grpc.aio, prometheus_client" || fail "grpc cannot be loaded"; }

# Check flags, port and files before any download: that requires only a Python.
flags=("$@")
before_install() {
  find_python $pythons python3
  "$found" -B "$root/ft/rpc/lighthouse_flags.py" ${flags[@]+"${flags[@]}"} || exit $?
}

training_venv=${PHAROS_VENV:-$root/.venv}
training_venv=${training_venv%/}
case $training_venv in /*) ;; *) training_venv=$PWD/$training_venv ;; esac
if [ "${PHAROS_NO_INSTALL:-0}" != 1 ] &&
  "$training_venv/bin/python" -I "$root/scripts/lib/missing.py" requirements-lighthouse.lock 2>/dev/null </dev/null; then
  python=$training_venv/bin/python
else
  PHAROS_VENV=$training_venv-lighthouse
  use_python requirements-lighthouse.lock
fi
exec "$python" "$root/ft/rpc/lighthouse_main.py" "$@"
