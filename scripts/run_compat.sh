#!/usr/bin/env bash
# Runs the tests that need no torch with every Python version found on this machine, and compiles all files with each.
# Virtual environments are in .venv-compat, one per version, with the pins of requirements*.lock.
set -euo pipefail
case ${1-} in --help | -h) sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac # the text above
# shellcheck source=scripts/lib/install.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib/install.sh"
cd "$root"

packages="numpy|tomli|pytest|pytest-timeout|hypothesis|protobuf|grpcio" # what these tests import
pins() { grep -hE "^($packages)==" requirements.lock requirements-dev.lock | sed 's/  #.*//'; } # keeps the markers, which pip evaluates

seen=" " failed=
for candidate in python3.{10..14} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[0-4]*/bin/python3; do
  answer=$(probe "$candidate") || continue
  minor=${answer%% *} base=${answer#* }
  case $seen in *" $minor "*) continue ;; esac
  seen="$seen$minor "
  venv=$root/.venv-compat/3.$minor
  if [ ! -f "$venv/pins" ] || [ "$(<"$venv/pins")" != "$(pins)" ]; then
    say "making $venv ..."
    "$base" -m venv --clear "$venv"
    pins >"$venv/pins.new"
    "$venv/bin/python" -I -m pip --disable-pip-version-check install -q -r "$venv/pins.new"
    mv "$venv/pins.new" "$venv/pins"
  fi
  printf '== Python 3.%s\n' "$minor"
  git ls-files -z '*.py' | PYTHONDONTWRITEBYTECODE=1 xargs -0 "$venv/bin/python" -W error::SyntaxWarning -c \
    'import ast, pathlib, sys; [compile(pathlib.Path(f).read_bytes(), f, "exec") for f in sys.argv[1:]]' || failed="$failed 3.$minor"
  "$venv/bin/python" -m pytest -q -r f -p no:cacheprovider tests/unit tests/protocol || failed="$failed 3.$minor"
done
[ -z "$failed" ] || die 1 "failed under Python$failed"
say "Pythons:$seen"
