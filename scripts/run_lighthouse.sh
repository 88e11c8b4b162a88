#!/usr/bin/env bash
# Starts a lighthouse: the one server of a job that tells groups who takes part. Becomes ft/rpc/lighthouse_main.py.
set -euo pipefail
# shellcheck source=scripts/lib/install.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib/install.sh"

usage() {
  cat <<END
usage: ./scripts/run_lighthouse.sh --min_replicas N [flags]

  ./scripts/run_lighthouse.sh --min_replicas 2                              this machine alone reaches it
  ./scripts/run_lighthouse.sh --min_replicas 2 --token_file token           whoever has the token reaches it

$(sed -n '/^  --/p' "$root/ft/rpc/lighthouse_flags.py")

Uses .venv if that has what a lighthouse needs, else makes .venv-lighthouse, which has no torch.
Environment: PYTHON, PHAROS_VENV, PHAROS_NO_INSTALL, as in run_train.sh.
Exit code: 0 after SIGTERM or Ctrl-C; 2 bad input; 1 the rest.
END
}

case " $* " in *" --help "* | *" -h "*) usage && exit 0 ;; esac

# What differs from a training environment: no torch.
unset TORCH_INDEX
install_torch() { torch_from=nowhere; }
try_it() { run_logged "$python" -Ic "import aiohttp.web, google.protobuf.timestamp_pb2, grpc.aio, prometheus_client" || fail "grpc cannot be loaded"; }

# A typing error, a taken port or a damaged file should not cost a download: the flags need no more than a Python.
flags=("$@")
before_install() {
  find_python $pythons python3
  PYTHONPATH=$root "$found" -B -m ft.rpc.lighthouse_flags ${flags[@]+"${flags[@]}"} || exit $?
}

trains_in=${PHAROS_VENV:-$root/.venv}
case $trains_in in /*) ;; *) trains_in=$PWD/$trains_in ;; esac
if [ "${PHAROS_NO_INSTALL:-0}" != 1 ] &&
  "$trains_in/bin/python" -I "$root/scripts/lib/missing.py" requirements-lighthouse.lock 2>/dev/null </dev/null; then
  python=$trains_in/bin/python
else
  PHAROS_VENV=$trains_in-lighthouse
  use_python requirements-lighthouse.lock
fi
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m ft.rpc.lighthouse_main "$@"
