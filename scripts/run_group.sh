#!/usr/bin/env bash
# A replica group where a scheduler takes machines away: run_train.sh, with an exit code that such a scheduler understands.
#
# Who evicts a pod sends SIGTERM. The group then saves, leaves and exits 0, which to a Job means finished: it would not come back. So after
# a SIGTERM the exit code is 143, whatever was saved; the next start goes on, or finds nothing left to do and exits 0.
set -uo pipefail

child='' told=''
trap 'told=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM
"$(dirname -- "${BASH_SOURCE[0]}")/run_train.sh" "$@" &
child=$!
wait "$child"
code=$?
while [ -n "$told" ] && kill -0 "$child" 2>/dev/null; do # the trap has ended the first wait; the group saves
  wait "$child"
done
if [ -n "$told" ]; then code=143; fi
exit "$code"
