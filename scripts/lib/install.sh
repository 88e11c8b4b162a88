# Finds a Python and creates the virtual environment once; each failure prints one line with a remedy.
# shellcheck shell=bash
# Sourced by scripts/*.sh, never run. Keeps to bash 3.2, which is what macOS has.
#
#   use_python LOCK...   sets $python to an interpreter that has the packages of the lock files, or exits: 2 bad input, 1 other errors
#
# Layout, next to $venv (PHAROS_VENV, or .venv in the repository), which many nodes may share:
#   $venv/pharos-LOCK     stamp: Python version, index of torch, text of the lock file. If it is up to date, pip is not run
#   $venv.partial         exists while an installation is incomplete, so $venv is discarded; has the errors of the last command
#   $venv.lock            locked by the process that installs; has its host and pid

root=$(cd -- "${BASH_SOURCE[0]%/*}/../.." >/dev/null && pwd)
oldest=10 newest=14 # of Python 3
pythons="python3.12 python3.13 python3.11 python3.14 python3.10"

torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf 'pharos: %s\n' "$*" >&2; }

die() { # die CODE MESSAGE...
  say "${@:2}"
  exit "$1"
}

use_python() {
  if [ "${PHAROS_NO_INSTALL:-0}" = 1 ]; then
    find_python python3 $pythons # python3 first: that of the active environment
    python=$found
    "$python" "$root/scripts/lib/missing.py" "$@" || exit 2
    return
  fi
  venv=${PHAROS_VENV:-$root/.venv}
  venv=${venv%/} # names of other files are made of it
  case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
  python=$venv/bin/python
  if is_complete "$@"; then return; fi
  before_install
  install "$@"
}

before_install() { :; } # a script that sources this file may override it with checks

check_file() { # a typing error in the name of a configuration should not cost a download
  case $1 in
    -*) ;;
    *) [ -f "$1" ] || die 2 "$1: no such file; nothing was installed" ;;
  esac
}

# Prints "MINOR EXECUTABLE" of a CPython 3. Runs the candidate, since pyenv leaves a python3.12 in the PATH that only prints "not found".
# For a virtual environment the executable is its base Python, since the environment may be the folder that is recreated.
probe() {
  "$1" -ISc 'import os, sys
minor = sys.version_info[1]
below = os.path.join(sys.base_prefix, "bin", "python3.%d" % minor)
if sys.version_info[0] == 3 and sys.implementation.name == "cpython":
    print(minor, below if os.path.exists(below) else sys.executable)' 2>/dev/null </dev/null
}

find_python() { # find_python NAME...: sets found (to run), base (to create environments with) and minor
  local candidate answer unfit=
  for candidate in ${PYTHON:+"$PYTHON"} "$@"; do
    if answer=$(probe "$candidate") && [ -n "$answer" ]; then
      minor=${answer%% *} base=${answer#* } found=$candidate
      if [ "$minor" -ge $oldest ] && [ "$minor" -le $newest ]; then return; fi
      unfit="$unfit, $candidate is 3.$minor"
    fi
    if [ -n "${PYTHON:-}" ]; then
      die 2 "PYTHON=$PYTHON: ${answer:+is Python 3.$minor, }must be a Python 3.$oldest to 3.$newest that runs"
    fi
  done
  die 1 "no Python 3.$oldest to 3.$newest found${unfit:+ (${unfit#, })}; install one (apt install python3.12-venv, brew install python@3.12)" \
    "or name one: PYTHON=/path/to/python3.12"
}

is_complete() {
  local lock answer stamp minor
  [ -x "$python" ] && answer=$(probe "$python") && [ -n "$answer" ] || return 1
  minor=${answer%% *}
  if [ -n "${PYTHON:-}" ]; then
    answer=$(probe "$PYTHON") && [ "${answer%% *}" = "$minor" ] || return 1
  fi
  for lock; do
    [ -f "$venv/pharos-$lock" ] && stamp=$(<"$venv/pharos-$lock") || return 1
    [ "$stamp" = "$(stamp_for "$lock" "${TORCH_INDEX:-$(index_of "$stamp")}")" ] || return 1
  done
}

stamp_for() { printf 'Python 3.%s, torch from %s\n%s\n' "$minor" "$2" "$(<"$root/$1")"; }

index_of() { # prints the index in a stamp
  local first=${1%%$'\n'*}
  printf '%s' "${first#*torch from }"
}

install() {
  find_python $pythons python3
  "$base" -Ic 'import ensurepip, venv' 2>/dev/null </dev/null ||
    die 1 "$base cannot create virtual environments (it has no ensurepip): apt install python3.$minor-venv, or a different Python with PYTHON=..."
  take_lock
  is_complete "$@" || fill_venv "$@"
  drop_lock
}

fill_venv() {
  local began=$SECONDS torch_from lock
  prepare_venv "$@"
  install_torch
  install_locked "$@"
  try_it "$@"
  for lock; do
    stamp_for "$lock" "$torch_from" >"$venv.partial"
    mv -f "$venv.partial" "$venv/pharos-$lock"
  done
  say "installed in $((SECONDS - began)) s; further launches do not install"
}

prepare_venv() { # prepare_venv LOCK...: creates an empty $venv or keeps an intact one; never deletes a folder that is not an environment
  local lock stamp stamps=("$venv"/pharos-*) clear=--clear answer=
  if [ -x "$python" ]; then answer=$(probe "$python") || answer=; fi
  if [ ! -e "$venv.partial" ]; then
    if [ -e "${stamps[0]}" ]; then
      stamp=$(<"${stamps[0]}")
      if [ "${answer%% *}" = "$minor" ] && [ "${TORCH_INDEX:-$(index_of "$stamp")}" = "$(index_of "$stamp")" ]; then clear=; fi
    elif [ "${answer%% *}" = "$minor" ] && "$python" -Ic 'import pip' 2>/dev/null </dev/null; then
      clear= # an environment that the user created: add to it
    elif [ -d "$venv" ] && ! rmdir "$venv" 2>/dev/null; then
      die 2 "$venv is not a Python 3.$minor environment with pip; remove it, or name a new folder: PHAROS_VENV=..."
    fi
  fi
  { : >"$venv.partial"; } 2>/dev/null || die 1 "cannot write beside $venv; PHAROS_VENV=/path/to/a/new/folder puts it elsewhere"
  for stamp in "${stamps[@]}"; do # keep valid stamps of other locks: all locks of a commit have the same versions
    lock=${stamp##*/pharos-}
    case " $* " in *" $lock "*) ;; *) if [ -z "$clear" ] && [ -f "$root/$lock" ] && is_complete "$lock"; then continue; fi ;; esac
    rm -f "$stamp"
  done
  say "installing into $venv with Python 3.$minor ($base)"
  if [ -n "$clear" ] || [ ! -x "$python" ]; then
    run_logged "$base" -I -m venv $clear "$venv" || fail "creating the virtual environment failed"
  fi
}

install_torch() { # sets torch_from; torch comes first, since PyPI's torch for Linux is always the CUDA build
  local release spec index=() size="0.5 GB, and 2.2 GB of CUDA libraries follow"
  release=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' "$root/requirements.lock")
  spec="torch==$release" torch_from=PyPI
  if [ -n "${TORCH_INDEX:-}" ]; then
    torch_from=$TORCH_INDEX size="from $TORCH_INDEX"
    index=(-i "$TORCH_INDEX")
  elif [ "$(uname -s)" != Linux ]; then
    size="80 MB"
  elif [[ $(nvidia-smi -L 2>/dev/null </dev/null) != *GPU* ]]; then # no driver
    if pip_knows "$release+cpu"; then
      spec="torch==$release+cpu" size="CPU build, 190 MB"
    elif pip_knows "$release+cpu" -i "$torch_cpu_index"; then
      spec="torch==$release+cpu" size="CPU build, 190 MB"
      index=(-i "$torch_cpu_index")
    elif pip_knows "$release"; then
      say "no CPU build of torch $release for Python 3.$minor at $torch_cpu_index; installing the CUDA build, which also runs without a GPU: 2.7 GB"
    fi
  fi
  say "installing torch $release ($size) ..."
  # Not -q on a terminal: it hides pip's progress bar.
  local quiet=-q
  if [ -t 1 ]; then quiet=; fi
  pip_install $quiet --no-deps ${index[@]+"${index[@]}"} "$spec" || fail_pip "torch $release"
}

pip_knows() { # pip_knows VERSION [pip options...]: whether the index has this torch; downloads nothing
  local version=$1 answer
  shift
  answer=$("$python" -I -m pip index versions --retries 1 --timeout 15 "$@" torch 2>/dev/null </dev/null) || return 1
  [[ "${answer//$'\n'/,}," == *[:,]" $version,"* ]]
}

install_locked() {
  local lock files=() quiet=-q
  for lock; do files+=(-r "$root/$lock"); done
  if [ "$torch_from" = PyPI ] && [ -t 1 ]; then quiet=; fi # may download gigabytes
  say "installing what $* lists ..."
  pip_install $quiet "${files[@]}" || fail_pip "the packages of $*"
}

# Imports what a run imports. Detects a torch that does not work here, and writes bytecode, which PYTHONDONTWRITEBYTECODE (usual in
# containers) would prevent later; pip's own compilation of all 8,000 files takes five times as long.
try_it() {
  local modules="torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.launcher.api, torch.utils.tensorboard"
  case $* in *dev*) modules="$modules, torch._inductor.compile_fx, hypothesis, pytest" ;; esac
  run_logged "$python" -Ic "import $modules" || fail "torch is installed but cannot be loaded"
}

pip_install() {
  # -I: packages of a PYTHONPATH do not count as installed. PIP_USER would put them into the home folder.
  PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 run_logged "$python" -I -m pip --disable-pip-version-check --no-input install --no-compile "$@"
}

# Runs in the background and waits, because bash handles a signal only between foreground commands. After a signal the shell exits
# through `stop`.
run_logged() {
  "$@" </dev/null 2>"$venv.partial" &
  child=$!
  local code=0
  wait "$child" || code=$?
  child=
  return $code
}

fail() { # prints what failed and the last line of the program's errors
  local last
  last=$(sed '/^ *$/d' "$venv.partial" | tail -n 1)
  die 1 "$1: ${last:-no message}"
}

fail_pip() {
  sed -n '/^ERROR/p' "$venv.partial" >&2
  case $(<"$venv.partial") in
    *"No space left"*) die 1 "no space left for $1 in $venv or in pip's temporary folder (TMPDIR); PHAROS_VENV=/path/to/a/new/folder puts it elsewhere" ;;
    *"Connection"* | *"Timeout"* | *"timed out"* | *"resolve"* | *"unreachable"* | *"ProxyError"* | *"SSLError"*)
      die 1 "no package index reached for $1; check the network, proxy and pip's settings, or without a network:" \
        "PHAROS_NO_INSTALL=1 PYTHON=/path/to/a/python/that/has/them" ;;
    *"No matching distribution"*)
      die 1 "no package of $1 for Python 3.$minor on $(uname -s) $(uname -m); take another Python with PYTHON=... (torch has wheels for" \
        "64-bit x86 and Arm Linux with glibc, and macOS on Arm), or one that has its own torch with PHAROS_NO_INSTALL=1 PYTHON=..." ;;
    *) die 1 "pip could not install $1; the next launch tries again" ;;
  esac
}

# With flock: the kernel releases it when the last process with descriptor 9 open ends, including a pip that outlives this shell.
take_lock() {
  local code waiting=
  mkdir -p "${venv%/*}" 2>/dev/null || true
  until [ "$venv.lock" -ef /dev/fd/9 ]; do # repeat if the previous owner removed the file before it was locked here
    { exec 9>>"$venv.lock"; } 2>/dev/null ||
      die 1 "cannot create the file $venv.lock; PHAROS_VENV=/path/to/a/new/folder puts the environment elsewhere"
    while code=0 && { try_lock || code=$?; } && [ $code = 75 ]; do
      [ -n "$waiting" ] || say "waiting for a different process ($(<"$venv.lock")) to finish installing into $venv"
      waiting=1
      sleep 1
    done
    [ $code = 0 ] || die 1 "cannot lock $venv.lock; PHAROS_VENV=/path/to/a/new/folder puts the environment elsewhere"
  done
  printf 'host %s, pid %s\n' "${HOSTNAME:-?}" $$ >"$venv.lock"
  child=
  trap drop_lock EXIT
  trap stop INT TERM HUP
}

try_lock() { # returns 75 if a different process has it
  "$base" -ISc 'import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(75)' 2>/dev/null </dev/null
}

drop_lock() {
  trap - EXIT INT TERM HUP
  rm -f "$venv.lock"
  exec 9>&-
}

stop() {
  trap '' INT TERM HUP
  if [ -n "$child" ]; then kill "$child" 2>/dev/null && wait "$child" 2>/dev/null || true; fi
  die 1 "stopped while installing; the next launch installs from the beginning"
}
