#!/usr/bin/env bash
# Runs the tests. Finds a Python, installs what is missing (once), and becomes pytest; arguments are pytest's.
#   ./scripts/run_tests.sh                      the first tier: what a contributor needs, ten minutes on two cores
#   ./scripts/run_tests.sh --all                everything
#   ./scripts/run_tests.sh tests/unit -k loss   a part
set -euo pipefail
# shellcheck source=scripts/lib/install.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib/install.sh"

use_python requirements.lock requirements-dev.lock
# The machine's cores are shared by the ranks that tests start, so no process takes them all.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd "$root"
# A tier runs two tests at a time (tests/conftest.py: those that may not); what is named, one after the other.
[[ $# -gt 0 && "$*" != --all ]] || set -- -n 2 --dist loadfile --no-loadscope-reorder "$@"
exec "$python" -m pytest "$@"
