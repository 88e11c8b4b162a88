#!/usr/bin/env bash
# Runs run_train.sh as a replica group under a scheduler that may evict it (Kubernetes, TorchX), and adapts the exit code.
#
# Eviction sends SIGTERM. run_train.sh then saves and exits 0, which a Kubernetes Job takes as finished and does not restart. So after a
# SIGTERM this script exits 143, whatever was saved; the restarted group resumes, or exits 0 if nothing is left to do.
# Arguments, environment and all other exit codes: ./scripts/run_train.sh --help
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as: sh SCRIPT
set -uo pipefail
case ${1-} in --help | -h) sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac # the text above

child='' terminated=''
trap 'terminated=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM
"$(dirname -- "${BASH_SOURCE[0]}")/run_train.sh" "$@" &
child=$!
[ -z "$terminated" ] || kill -TERM "$child" 2>/dev/null # it came before the trap knew the child
wait "$child"
code=$?
while [ -n "$terminated" ] && kill -0 "$child" 2>/dev/null; do # the trap interrupted the first wait; the group saves
  wait "$child"
done
if [ -n "$terminated" ]; then code=143; fi
exit "$code"
