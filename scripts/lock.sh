#!/usr/bin/env bash
# Writes requirements.lock, -dev.lock and -lighthouse.lock from pyproject.toml, for every Python and platform at once (for maintainers),
# then checks that each pin has a wheel on each of them. --upgrade moves every pin to the newest release in its range.
# Needs uv (`pip install uv`): pip resolves only for the Python that runs it.
set -euo pipefail
case ${1-} in --help | -h) sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac # the text above
cd "${BASH_SOURCE[0]%/*}/.."

compile() {  # uv reads the existing output file, and keeps its pins that are still in range
  uv pip compile --quiet --universal --python-version 3.10 --no-header --annotation-style line "$@" >/dev/null
}

made="Made by scripts/lock.sh from pyproject.toml; do not edit."
compile pyproject.toml --output-file requirements.lock "$@"
compile pyproject.toml --output-file requirements-dev.lock --extra dev --constraint requirements.lock "$@"
sed -n '/^lighthouse = \[/,/^]/s/^ *"\([^"]*\)".*/\1/p' pyproject.toml |  # only the extra: a lighthouse does not need the base requirements
  compile - --output-file requirements-lighthouse.lock --constraint requirements.lock --constraint requirements-dev.lock "$@"

body=$(grep -v '^#' requirements.lock)
printf '%s\n' "# $made Everything that training needs on Python 3.10-3.14, save torch's own requirements." "$body" >requirements.lock
body=$(grep -v -e '^#' -e '-c requirements.lock' requirements-dev.lock)
printf '%s\n' "# $made What the tests need on top of requirements.lock." "$body" >requirements-dev.lock
body=$(sed '/^#/d; s/ *# via.*//' requirements-lighthouse.lock)
printf '%s\n' "# $made What a lighthouse needs where nobody trains." "$body" >requirements-lighthouse.lock

export MACOSX_DEPLOYMENT_TARGET=14.0  # the oldest macOS that torch has wheels for
for python in 3.10 3.11 3.12 3.13 3.14; do
  for platform in x86_64-manylinux_2_28 aarch64-manylinux_2_28 aarch64-apple-darwin; do
    uv pip compile requirements.lock requirements-dev.lock requirements-lighthouse.lock --quiet --no-header --no-annotate --no-deps --only-binary :all: \
      --python-version "$python" --python-platform "$platform" >/dev/null
    printf 'wheels for Python %s on %s: all available\n' "$python" "$platform"
  done
done
