"""scripts/run_train.sh up to the point where it becomes launch.py, on machines made of a PATH full of stubs. Offline."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ["bash", "cat", "cp", "dirname", "env", "mkdir", "mv", "rm", "rmdir", "sed", "sleep", "tail", "uname"]
# A Python that answers what install.sh asks, writes down what it was told to do, and obeys files in $MACHINE.
PYTHON = """\
#!/usr/bin/env bash
case "$1 $2 $3" in
  "-ISc "*fcntl*) exec "$REAL_PYTHON" "$@" ;;
  "-ISc "*) echo "MINOR $0" && exit ;;
  "-Ic import ensurepip"*) [ ! -e "$MACHINE/no_ensurepip" ]; exit ;;
  "-Ic import pip"*) exit 0 ;;
esac
echo "$*" >>"$MACHINE/calls"
case "$*" in
  *"--check"*) [ ! -e "$MACHINE/refuses" ] || { cat "$MACHINE/refuses" >&2; exit 2; } ;;
  *missing.py*) exec "$REAL_PYTHON" -I -S "$@" ;;
  *"-m venv"*) for folder; do :; done; mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python" ;;
  *"index versions"*"-i "*) [ ! -e "$MACHINE/indexed" ] || cat "$MACHINE/indexed" ;;
  *"index versions"*) [ ! -e "$MACHINE/known" ] || cat "$MACHINE/known" ;;
  *"install"*torch==*)
    [ ! -e "$MACHINE/gate" ] || read -r _ <"$MACHINE/gate"
    if [ -e "$MACHINE/pip_fails" ]; then cat "$MACHINE/pip_fails" >&2; exit 1; fi ;;
esac
"""
DEAD_SHIM = "#!/usr/bin/env bash\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"
NVIDIA_SMI = "#!/usr/bin/env bash\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n"
NO_WHEEL = """\
ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)
ERROR: No matching distribution found for torch==2.13.0
"""
NO_NETWORK = f"""\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError: Failed to establish a new connection'
{NO_WHEEL}"""


@dataclass
class Machine:
    """A repository and a PATH in a temporary folder."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    @property
    def venv(self) -> Path:
        return self.repository / ".venv"

    def has(self, name: str, text: str = PYTHON, minor: int = 12) -> None:
        """Adds a program to the PATH."""
        path = self.folder / "bin" / name
        path.write_text(text.replace("MINOR", str(minor)))
        path.chmod(0o755)

    def tell(self, name: str, text: str = "") -> None:
        """Sets how the stub Python behaves."""
        (self.folder / name).write_text(text)

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def forget(self) -> None:
        (self.folder / "calls").unlink()

    def start(self, *arguments: str, script: str = "run_train.sh", **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(self.repository / "scripts" / script), *(arguments or ["job.toml"])],
            cwd=self.repository,
            env={"PATH": str(self.folder / "bin"), "MACHINE": str(self.folder), "REAL_PYTHON": sys.executable, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, script: str = "run_train.sh", **env: str) -> tuple[int, str, str]:
        """Returns exit code, standard output, standard error."""
        process = self.start(*arguments, script=script, **env)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine with Python 3.12, which a test may remove."""
    made = Machine(tmp_path)
    for folder in (tmp_path / "bin", made.repository / "scripts"):
        folder.mkdir(parents=True)
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool} here"))
    shutil.copytree(ROOT / "scripts", made.repository / "scripts", dirs_exist_ok=True)
    for name in ("pyproject.toml", "requirements.lock", "requirements-dev.lock", "requirements-lighthouse.lock"):
        shutil.copy(ROOT / name, made.repository)
    (made.repository / "job.toml").touch()
    made.has("python3.12")
    yield made
    for process in made.started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("script", ["run_train.sh", "run_replicas.sh", "run_group.sh", "run_lighthouse.sh"])
def test_a_shell_that_is_not_bash_hands_over_to_it(script: str):
    ran = subprocess.run(["sh", ROOT / "scripts" / script, "--help"], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "") and "./scripts/run_" in ran.stdout


def test_help_needs_nothing(machine: Machine):
    (machine.folder / "bin" / "python3.12").unlink()
    code, out, err = machine.run("--help")
    assert code == 0 and not err
    names = "PYTHON PHAROS_VENV TORCH_INDEX PHAROS_NO_INSTALL NPROC NGPU NNODES NODE_RANK RDZV_ENDPOINT LOG_RANK MAX_RESTARTS"
    for name in names.split():
        assert name in out
    assert "./scripts/run_train.sh [CONFIG] --help SECTION" in out


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("run_group.sh", "exits 143"),
        ("run_compat.sh", ".venv-compat"),
        ("run_checks.sh", "Static checks"),
        ("lock.sh", "--upgrade"),
        ("make_proto.sh", "PROTO_PYTHON"),
    ],
)
def test_help_of_a_script_is_its_head_and_starts_nothing(machine: Machine, script: str, words: str):
    for flag in ("--help", "-h"):
        code, out, err = machine.run(flag, script=script)
        assert code == 0 and not err
        assert words in out and "set -" not in out and "#" not in out
    assert not machine.calls()


def test_first_start_installs_and_second_does_not(machine: Machine):
    machine.tell("known", "torch (2.14.0)\nAvailable versions: 2.14.0, 2.13.0+cpu, 2.13.0\n")
    code, _, err = machine.run("job.toml", "--training.steps", "3")
    assert code == 0, err
    assert len([call for call in machine.calls() if "-m venv" in call]) == 1
    assert machine.calls()[-1].endswith("scripts/launch.py job.toml --training.steps 3")
    assert not list(machine.repository.glob(".venv.*")), "the lock and the mark of an unfinished installation are gone"
    machine.forget()
    code, _, err = machine.run()
    assert (code, err) == (0, "")
    assert machine.calls() == [f"{machine.repository}/scripts/launch.py job.toml"]


@pytest.mark.parametrize(
    ("script", "lock", "between"),
    [("run_train.sh", "requirements.lock", []), ("run_tests.sh", "requirements-dev.lock", ["run_replicas.sh"])],
)
def test_a_changed_lock_file_is_installed_into_what_is_there(
    machine: Machine, script: str, lock: str, between: list[str]
):
    assert machine.run(script=script)[0] == 0
    with (machine.repository / lock).open("a") as opened:
        opened.write("added==1\n")
    assert all(machine.run(script=other)[0] == 0 for other in between)
    machine.forget()
    assert machine.run(script=script)[0] == 0
    assert any("-r " in call and lock in call for call in machine.calls())
    assert not any("-m venv" in call for call in machine.calls())


def test_tests_install_both_lock_files_and_pass_arguments_on(machine: Machine):
    assert machine.run("tests/unit", "-k", "loss", script="run_tests.sh")[0] == 0
    assert any("requirements.lock" in call and "requirements-dev.lock" in call for call in machine.calls())
    assert machine.calls()[-1] == "-m pytest tests/unit -k loss"


def test_groups_of_one_machine_bring_their_lighthouse_and_leave_what_is_there(machine: Machine):
    """The lighthouse's packages are added to the environment of training and tests; later calls install nothing."""
    for script in ("run_train.sh", "run_tests.sh"):
        assert machine.run(script=script)[0] == 0
    machine.forget()
    assert machine.run("job.toml", "--groups", "2", script="run_replicas.sh")[0] == 0
    [installs] = [call for call in machine.calls() if "-r " in call]
    assert "requirements.lock" in installs and "requirements-lighthouse.lock" in installs
    assert machine.calls()[-1].endswith("scripts/replicas.py job.toml --groups 2")
    assert not any("-m venv" in call for call in machine.calls())
    machine.forget()
    for script in ("run_replicas.sh", "run_tests.sh", "run_train.sh"):
        assert machine.run("job.toml", "--groups", "2", script=script)[0] == 0
    assert len(machine.calls()) == 3, "nothing but what was to run"


def test_a_job_of_slurm_installs_before_its_groups_start(machine: Machine):
    job = {"PHAROS_ROOT": str(machine.repository), "SLURM_JOB_ID": "7"}
    assert machine.run(script="slurm/train.sbatch", **job)[0] == 0
    [installs] = [call for call in machine.calls() if "-r " in call]
    assert "requirements.lock" in installs and "requirements-lighthouse.lock" in installs
    assert machine.calls()[-1].endswith("scripts/slurm/groups.py job.toml")
    job["SLURM_JOB_ID"] = ""
    assert_one_line(
        machine.run(script="slurm/train.sbatch", **job), 2, "submit this script: sbatch --nodes 2 scripts/slurm/"
    )


# which Python


def test_a_shim_that_does_not_run_is_passed_over(machine: Machine):
    machine.has("python3.12", DEAD_SHIM)
    machine.has("python3.13", minor=13)
    code, _, err = machine.run()
    assert code == 0 and "with Python 3.13" in err


@pytest.mark.parametrize(
    ("name", "minor", "env", "code", "said"),
    [
        ("none", 12, {}, 1, "no Python 3.10 to 3.14 found; install one"),
        ("python3", 8, {}, 1, "no Python 3.10 to 3.14 found (python3 is 3.8); install one"),
        (
            "python3",
            8,
            {"PYTHON": "python3"},
            2,
            "PYTHON=python3: is Python 3.8, must be a Python 3.10 to 3.14 that runs",
        ),
        ("python3.12", 12, {"PYTHON": "nothere"}, 2, "PYTHON=nothere: must be a Python 3.10 to 3.14 that runs"),
    ],
)
def test_no_usable_python(machine: Machine, name: str, minor: int, env: dict[str, str], code: int, said: str):
    (machine.folder / "bin" / "python3.12").rename(machine.folder / "bin" / name)
    machine.has(name, minor=minor)
    assert_one_line(machine.run(**env), code, said)


def test_no_ensurepip(machine: Machine):
    machine.tell("no_ensurepip")
    assert_one_line(machine.run(), 1, "apt install python3.12-venv")


@pytest.mark.parametrize("script", ["run_train.sh", "run_replicas.sh"])
def test_a_missing_config_costs_no_installation(machine: Machine, script: str):
    assert_one_line(machine.run("lama.toml", script=script), 2, "lama.toml: no such file; nothing was installed")
    assert not machine.calls()


def test_settings_that_groups_cannot_have_cost_no_installation(machine: Machine):
    assert machine.run()[0] == 0
    machine.forget()
    machine.tell("refuses", "pharos: --groups 0: must be at least 1\n")
    result = machine.run("job.toml", "--groups", "0", script="run_replicas.sh")
    assert_one_line(result, 2, "--groups 0: must be at least 1")
    [call] = machine.calls()
    assert call.endswith("scripts/replicas.py --check job.toml --groups 0")


def test_the_keys_of_a_section_are_listed_by_the_launcher(machine: Machine):
    for words in (("job.toml", "--help", "model"), ("--help", "model"), ("job.toml", "-h", "model")):
        assert machine.run(*words)[0] == 0
        assert machine.calls()[-1].endswith(f"scripts/launch.py {' '.join(words)}")


@pytest.mark.parametrize("script", ["run_train.sh", "run_replicas.sh"])
def test_a_value_that_contains_a_flag_for_help_is_a_value(machine: Machine, script: str):
    assert "usage" not in machine.run("job.toml", "--sample.prompt", "ls -h", script=script)[1]
    assert machine.calls()[-1].endswith("job.toml --sample.prompt ls -h")


# which torch


@pytest.mark.parametrize(
    ("known", "indexed", "gpu", "env", "installs"),
    [
        ("2.13.0+cpu, 2.13.0", "", False, {}, "torch==2.13.0+cpu"),
        ("2.13.0", "2.13.0+cpu", False, {}, "-i https://download.pytorch.org/whl/cpu torch==2.13.0+cpu"),
        ("2.13.0", "", False, {}, "torch==2.13.0"),
        ("2.13.0+cpu, 2.13.0", "", True, {}, "torch==2.13.0"),
        ("2.13.0+cpu", "", False, {"TORCH_INDEX": "https://a.b/c"}, "-i https://a.b/c torch==2.13.0"),
    ],
)
def test_torch_comes_first_alone_and_without_cuda_where_there_is_no_driver(
    machine: Machine, known: str, indexed: str, gpu: bool, env: dict[str, str], installs: str
):
    machine.tell("known", f"Available versions: {known}\n")
    machine.tell("indexed", f"Available versions: {indexed}\n")
    if gpu:
        machine.has("nvidia-smi", NVIDIA_SMI)
    code, _, err = machine.run(**env)
    assert code == 0, err
    first, second = (call for call in machine.calls() if " install " in call)
    assert first.endswith(f" -q --no-deps {installs}") and "-r " in second
    assert ("2.7 GB" in err) == (installs == "torch==2.13.0" and not gpu)


@pytest.mark.parametrize(
    ("pip_says", "said"),
    [
        (NO_NETWORK, "no package index reached for torch 2.13.0"),
        (NO_WHEEL, "no package of torch 2.13.0 for Python 3.12 on"),
    ],
)
def test_pip_fails(machine: Machine, pip_says: str, said: str):
    machine.tell("pip_fails", pip_says)
    code, _, err = machine.run()
    assert code == 1 and said in err.splitlines()[-1] and "PHAROS_NO_INSTALL=1" in err.splitlines()[-1]
    assert not machine.venv.with_name(".venv.lock").exists()
    (machine.folder / "pip_fails").unlink()
    assert machine.run()[0] == 0


# one at a time, and all or nothing


def test_two_starts_at_once_install_once(machine: Machine):
    os.mkfifo(machine.folder / "gate")
    first = machine.start()
    wait_for_line(first, "installing torch")
    second = machine.start()
    wait_for_line(second, "waiting for a different process")
    (machine.folder / "gate").write_text("\n")
    for process in (first, second):
        assert process.wait(timeout=30) == 0
    assert len([call for call in machine.calls() if "-m venv" in call]) == 1
    assert len([call for call in machine.calls() if "launch.py" in call]) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_interrupted_installation_is_begun_again(machine: Machine, number: signal.Signals):
    os.mkfifo(machine.folder / "gate")
    first = machine.start()
    with (machine.folder / "gate").open("w"):  # opens when pip opens it to read, and keeps pip waiting
        if number == signal.SIGKILL:
            os.killpg(first.pid, number)  # with all it started, as a machine that goes down
        else:
            first.send_signal(number)
        _, err = first.communicate(timeout=30)
    assert first.returncode != 0 and ("stopped while installing" in err) == (number == signal.SIGTERM)
    (machine.folder / "gate").unlink()
    code, _, err = machine.run()
    assert code == 0, err
    assert sum("-m venv --clear" in call for call in machine.calls()) == 2, "from the beginning, not on top of a half"


def test_the_name_of_a_new_folder_may_end_with_a_slash(machine: Machine):
    code, _, err = machine.run(PHAROS_VENV=f"{machine.folder}/new/")
    assert code == 0 and (machine.folder / "new" / "bin" / "python").exists(), err
    code, _, err = machine.run(
        "--min_replicas", "1", script="run_lighthouse.sh", PHAROS_VENV=f"{machine.folder}/other/"
    )
    assert code == 0 and (machine.folder / "other-lighthouse").is_dir(), err


def test_a_folder_that_is_no_environment_is_not_touched(machine: Machine):
    (machine.folder / "thesis").mkdir()
    (machine.folder / "thesis" / "chapter").touch()
    assert_one_line(machine.run(PHAROS_VENV=str(machine.folder / "thesis")), 2, "name a new folder: PHAROS_VENV=")
    assert list((machine.folder / "thesis").iterdir()) == [machine.folder / "thesis" / "chapter"]


# without installing


@pytest.mark.parametrize(
    ("arguments", "script", "lacks"),
    [
        ((), "run_train.sh", "lacks torch>=2.11,<2.14, torchdata>=0.11, numpy>=2,"),
        (("job.toml", "--groups=2"), "run_replicas.sh", "aiohttp>=3.11, prometheus-client>=0.21;"),  # the lighthouse's
    ],
)
def test_no_install_says_what_is_missing(machine: Machine, arguments: tuple[str, ...], script: str, lacks: str):
    machine.has("mine")
    result = machine.run(*arguments, script=script, PHAROS_NO_INSTALL="1", PYTHON="mine")
    assert_one_line(result, 2, lacks)
    assert not machine.venv.exists() and not any("pip" in call for call in machine.calls())


def test_no_install_says_what_is_too_old(machine: Machine):
    machine.has("mine", PYTHON.replace("-I -S", ""))
    pyproject = machine.repository / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("torch>=2.11,<2.14", "torch>=2.99,<3"))
    assert_one_line(machine.run(PHAROS_NO_INSTALL="1", PYTHON="mine"), 2, "lacks torch>=2.99,<3 (it has 2.1")


def test_no_install_uses_the_python_as_it_is(machine: Machine):
    machine.has("mine", PYTHON.replace("-I -S", ""))
    code, _, err = machine.run(PHAROS_NO_INSTALL="1", PYTHON="mine")
    assert (code, err) == (0, "")
    assert machine.calls()[-1] == f"{machine.repository}/scripts/launch.py job.toml" and not machine.venv.exists()


def assert_one_line(result: tuple[int, str, str], code: int, said: str) -> None:
    assert result[0] == code and result[1] == ""
    assert result[2].startswith("pharos: ") and said in result[2] and result[2].count("\n") == 1, result[2]


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    pytest.fail(f"never said: {text}")
