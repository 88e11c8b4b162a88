#!/usr/bin/env bash
# Runs the tests. Finds a Python, installs what is missing (once), and execs pytest with all arguments.
#   ./scripts/run_tests.sh                      the first tier, about 10 minutes on two cores
#   ./scripts/run_tests.sh --all                both tiers
#   ./scripts/run_tests.sh --long               those that both leave out for time (make long)
#   ./scripts/run_tests.sh tests/unit -k loss   a part
set -euo pipefail
# shellcheck source=scripts/lib/install.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib/install.sh"

use_python requirements.lock requirements-dev.lock
# Tests start several ranks, which share the machine's cores, so each process has one thread.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
unset PYTHONDONTWRITEBYTECODE # usual in containers; each process would compile what it imports
cd "$root"
# A tier runs three tests at a time (except as in tests/conftest.py), since they wait much; named tests run one after the other.
[[ $# -gt 0 && "$*" != --all && "$*" != --long ]] || set -- -n 3 --dist loadfile --no-loadscope-reorder "$@"
exec "$python" -m pytest "$@"
