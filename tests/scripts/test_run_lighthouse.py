"""scripts/run_lighthouse.sh as a user starts it: bad input costs one line and no installation, a good start answers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ft.protocol import messages as m
from ft.rpc import lighthouse_flags
from tests.rpc.wire import Wire, quorum_of
from tests.scripts.test_install import PYTHON, Machine, machine  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "run_lighthouse.sh"
N = ["--min_replicas", "1"]
BAR = "\\|"  # in a table
HERE = [*N, "--bind", "127.0.0.1:0"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "empty").touch()
    (tmp_path / "damaged.json").write_text('{"format": "pharos lighthouse 1", "last_id": ')
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    yield tmp_path
    assert sorted(tmp_path.iterdir()) == before, "nothing was installed, and nothing is left"


def _run(folder: Path, *flags: str, **env: str) -> tuple[int, str, str]:
    """Runs the script as on a machine that has only Python. Returns exit code, standard output, standard error."""
    bare = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PHAROS_VENV": str(folder / "venv")}
    done = subprocess.run([SCRIPT, *flags], cwd=folder, env={**bare, **env}, capture_output=True, text=True, timeout=50)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--min_replicas is missing: the fewest groups that train, 1 or more"),
        (["--min_replicas", "0"], "--min_replicas: 0: must be a whole number from 1 to 1048576"),
        (["--min_replicas", "x\ny"], "--min_replicas: x y: must be a whole number from 1 to 1048576"),
        (
            [*N, "--bind", "192.0.2.1:29510", "--insecure"],
            "--bind 192.0.2.1:29510: that is not an address of this machine",
        ),
        ([*N, "--bind", "no..host:1", "--insecure"], "there is no host no..host"),
        ([*N, "--bind", "127.0.0.1:65535"], "set --http HOST:PORT or none"),
        ([*HERE, "--tls_cert", "empty", "--tls_key", "empty"], "TLS with empty, empty: "),
        ([*HERE, "--token_file", "folder"], "no token in folder: "),
        ([*HERE, "--token_file", "empty"], "the token of empty must have at least 16 printable characters"),
        ([*HERE, "--state_file", "damaged.json"], "--state_file: damaged.json is not a state file: "),
        ([*HERE, "--state_file", "folder"], "--state_file folder: is a folder"),
        ([*HERE, "--state_file", "none/state.json"], "--state_file none/state.json: there is no folder none"),
        ([*HERE, "--state_file", "/proc/state.json"], "--state_file /proc/state.json: the folder cannot be written"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_installed(folder: Path, flags: list[str], said: str):
    code, out, err = _run(folder, *flags)
    assert (code, out) == (2, "") and err.startswith("lighthouse: ") and said in err and err.count("\n") == 1, err


def test_a_taken_port_is_told_before_anything_is_installed(folder: Path):
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        taken, free = f"127.0.0.1:{port}", "127.0.0.1:0"
        for flags, said in (
            (["--bind", taken], f"--bind {taken}: the port is in use, perhaps by an earlier start"),
            (["--bind", free, "--http", taken], f"--http {taken}: the port is in use"),
        ):
            code, _, err = _run(folder, *N, *flags)
            assert code == 2 and said in err and err.count("\n") == 1, err
    code, _, err = _run(folder, *N, "--bind", f"127.0.0.1:{port}", "--http", f"127.0.0.1:{port}")
    assert code == 2 and f"is the port of --bind; nearest: 127.0.0.1:{port + 1}" in err and err.count("\n") == 1, err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_token_that_may_not_be_read(folder: Path):
    (folder / "empty").chmod(stat.S_IWUSR)
    assert "Permission denied" in _run(folder, *HERE, "--token_file", "empty")[2]


def test_a_first_start_checks_then_installs_what_a_lighthouse_needs(machine: Machine):  # noqa: F811
    checks = '"$*" in\n  *lighthouse_flags*) exit "$(cat "$MACHINE/says")" ;;\n'
    machine.has("python3.12", PYTHON.replace('"$*" in\n', checks))
    shutil.copy(ROOT / "requirements-lighthouse.lock", machine.repository)
    machine.tell("says", "2")
    assert machine.run(*N, "--bind", "here", script="run_lighthouse.sh")[0] == 2
    assert machine.calls() == [f"-B {machine.repository}/ft/rpc/lighthouse_flags.py --min_replicas 1 --bind here"], (
        "and nothing else ran"
    )
    machine.tell("says", "0")
    code, _, err = machine.run(*N, script="run_lighthouse.sh")
    assert code == 0, err
    calls = "\n".join(machine.calls())
    assert "-m venv" in calls and "-r " in calls and "requirements-lighthouse.lock" in calls
    assert "torch" not in calls and calls.endswith("/ft/rpc/lighthouse_main.py --min_replicas 1")
    assert machine.venv.with_name(".venv-lighthouse").is_dir() and not machine.venv.exists()
    machine.forget()
    assert machine.run(*N, script="run_lighthouse.sh")[0] == 0
    assert machine.calls() == [f"{machine.repository}/ft/rpc/lighthouse_main.py --min_replicas 1"], (
        "the second start goes straight to work"
    )


def test_what_a_lighthouse_installs():
    names = {re.split(r"[=\s]", line)[0] for line in (ROOT / "requirements-lighthouse.lock").read_text().splitlines()}
    assert {"grpcio", "protobuf", "aiohttp", "prometheus-client"} < names
    assert not {"torch", "numpy"} & names


def test_a_good_start_answers_and_ends_quietly(tmp_path: Path):
    (tmp_path / "ft").mkdir()  # of another checkout, say, in the working folder
    (tmp_path / "ft" / "__init__.py").write_text("raise SystemExit('another ft')\n")
    env = {**os.environ, "PYTHON": sys.executable, "PHAROS_NO_INSTALL": "1"}
    with subprocess.Popen(
        [SCRIPT, *HERE], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        wire = Wire(process.stdout.readline().strip())
        assert quorum_of(wire.pharos(m.Call(m.Member("a:1")))).quorum_id == 1
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=50)
        wire.close()
    assert process.returncode == 0 and "Traceback" not in err


def test_the_help_of_the_script_is_that_of_the_program():
    code, out, _ = _run(ROOT, "--help")
    options = {flag for action in lighthouse_flags.parser()._actions for flag in action.option_strings}
    hidden = {"-h", "--lower_terms"}  # the latter: the former name of --lower_limits
    assert code == 0 and set(re.findall(r"--\w+", out)) | {"--help"} == options - hidden
    for action in lighthouse_flags.parser()._actions:
        if isinstance(action.default, int | float) and not isinstance(action.default, bool):
            assert re.search(rf"{action.option_strings[0]} .*; {action.default:g}\n", out), action.option_strings


def test_the_page_about_the_lighthouse_has_its_flags():
    """The table on the page is the text of --help, row by row; test_lighthouse_main compares that text with the parser's flags."""
    usage = re.findall(r"^  (--.*?)  +(.+)$", lighthouse_flags.USAGE, re.MULTILINE)
    rows = [f"| `{flag.replace('|', BAR)}` | {text} |" for flag, text in usage]
    page = (ROOT / "docs" / "lighthouse.md").read_text()
    assert len(rows) == 16 and [line for line in page.splitlines() if line.startswith("| `")] == rows
