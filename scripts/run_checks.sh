#!/usr/bin/env bash
# Static checks: style, format, types, shell syntax. .ci/run runs them before the tests.
set -euo pipefail
case ${1-} in --help | -h) sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac # the text above
# shellcheck source=scripts/lib/install.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib/install.sh"

use_python requirements.lock requirements-dev.lock
cd "$root"
for script in scripts/*.sh scripts/lib/*.sh scripts/slurm/*.sbatch .ci/run; do bash -n "$script"; done
"$python" -m ruff check --quiet .
"$python" -m ruff format --check --quiet .
exec "$python" -m mypy
