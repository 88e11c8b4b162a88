"""Starts training on this node: checks the settings, then runs the ranks.

    run_train.sh -> launch.py -> train.py, in this process             one rank: nothing to supervise, torch is loaded once
                              -> agent.py -> lib/lifeline.py -> train.py   more ranks, more nodes, or restarts

Exit code: 0 finished, or saved on SIGTERM or SIGINT; 2 bad input: one message, as a rule before any rank is started; 1 other errors;
128 + n stop signal n while no step was under way, or the second one, with one rank in this process.
`./scripts/run_train.sh --help` lists the environment variables.
"""

from __future__ import annotations

import gc
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

ROOT = Path(__file__).resolve().parent.parent
# Run by path, from any folder: the repository first, and not scripts/, whose files could shadow a package.
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "scripts"))]

from scripts.launch_settings import LaunchSettings, end_program, handle_early_stop, open_closed_streams, say  # noqa: E402

if TYPE_CHECKING:
    from configs.schema import RunConfig


def main(argv: list[str]) -> int:
    threads_are_given = "OMP_NUM_THREADS" in os.environ
    try:
        launch_settings = LaunchSettings.read(os.environ)
        set_defaults(os.environ, nproc=launch_settings.nproc or 1)
        if "--help" in argv or "-h" in argv:
            from configs.help import print_help

            print_help(*argv)
            return 0
        if "--explain" in argv:
            from tools.explain.command import main as explain

            return explain(argv)
        from configs.load import load

        config = load(argv)  # imports torch, if the file can be read
        nproc = ranks_here(launch_settings)
        in_process = nproc == launch_settings.nnodes == 1 and launch_settings.max_restarts == 0
        if in_process and (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":  # else the ranks get their own
            raise ValueError(f"WORLD_SIZE={ranks}: of another launcher; this one starts 1 rank: unset it, or set NPROC")
        if not in_process:
            check(config, world_size=nproc * launch_settings.nnodes)
        logs = config.run_folder / "logs"
        if config.fault_tolerance.enable:
            from ft.config import Environment, group_folder

            logs = group_folder(config.run_folder, config.fault_tolerance, Environment.read(os.environ))
    except ValueError as error:
        from configs.errors import explained  # a launcher variable needs none of it

        say(explained(error))
        return 2
    if in_process:
        return run_here(argv, logs)
    if not threads_are_given:  # by the number of ranks that is known only now
        os.environ["OMP_NUM_THREADS"] = threads_per_rank(nproc)
    from scripts.agent import run_ranks

    gc.enable()
    return run_ranks([sys.executable, str(ROOT / "train.py"), *argv], launch_settings, nproc=nproc, logs=logs)


def check(config: RunConfig, *, world_size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Checks the settings and the saved config. Raises ValueError. With one rank in this process train.py checks instead."""
    from configs.check import check, check_resume
    from configs.saved import check_saved, fetch_saved
    from ft.config import Environment

    config = fetch_saved(config)
    check(config, world_size=world_size)
    changed = check_saved(config, config.run_folder, world_size=world_size)
    check_resume(config, changed, world_size=world_size)
    Environment.read(environ).check(config.fault_tolerance)


def ranks_here(launch_settings: LaunchSettings) -> int:
    """Returns the number of ranks on this node. Raises ValueError: more ranks than GPUs, or GPUs that torch cannot use."""
    import torch

    if torch.cuda.is_available():
        visible = torch.cuda.device_count()
        if launch_settings.nproc and launch_settings.nproc > visible:
            raise ValueError(f"NPROC={launch_settings.nproc}: more ranks than the {visible} GPUs that are visible here")
        return launch_settings.nproc or visible
    gpus_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1", "NoDevFiles")
    gpus = 0 if gpus_hidden else sum(line.startswith("GPU") for line in _nvidia_smi("-L").splitlines())
    if gpus:
        driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
        remedy = (
            "it needs a newer driver, or a different build: TORCH_INDEX=https://download.pytorch.org/whl/cu126 "
            "./scripts/run_train.sh ... installs one for older drivers"
            if torch.version.cuda
            else f"it is a CPU build: remove {sys.prefix} and run the command again on this machine"
        )
        raise ValueError(
            f"nvidia-smi sees {gpus} GPU{'s' * (gpus > 1)} (driver {driver}), but torch {torch.__version__} "
            f"(CUDA {torch.version.cuda or 'none'}) sees none: {remedy}; to train on the CPU: CUDA_VISIBLE_DEVICES=-1"
        )
    return launch_settings.nproc or 1


def _nvidia_smi(*arguments: str) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60).stdout.strip()
    return ""


def set_defaults(env: MutableMapping[str, str], *, nproc: int) -> None:
    """Sets variables for threads and the CUDA allocator unless the user has set them. Call before torch is imported.

    TORCH_NCCL_AVOID_RECORD_STREAMS is not set: in torch 2.11 to 2.13 the behaviour of 1 is the default, and setting it prints a deprecation
    warning (the constructor in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
    """
    env.setdefault("OMP_NUM_THREADS", threads_per_rank(nproc))
    # Iterations that a waiting OpenMP thread spins before it sleeps. With GNU's default of 300,000 and other programs running, it keeps
    # the core from the thread that it waits for. With 0 the speed on an idle machine is halved (docs/benchmarks.md).
    env.setdefault("GOMP_SPINCOUNT", "10000")
    # torch 2.11 to 2.13 read this name first; PYTORCH_CUDA_ALLOC_CONF is the old name (c10/core/AllocatorConfig.h).
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in env:
        env.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def threads_per_rank(nproc: int) -> str:
    return str(max(1, cores_here() // nproc))


def cores_here() -> int:
    """Returns the number of cores that this process may use, within a container's quota, which Python and OpenMP ignore."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()  # cgroup v2; "max" is no quota
        cores = min(cores, int(quota) // int(period))
    return cores


def run_here(argv: list[str], logs: Path) -> int:
    """Runs train.py as `python train.py` does, with its output also in `logs`. Signals and exit code are those of train.py."""
    log = LogFile(logs / "rank0.log")
    # a character that the locale lacks is escaped there, as Python does on stderr, and kept in the log
    cast(TextIOWrapper, sys.stdout).reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = cast(TextIO, Tee(sys.stdout, log)), cast(TextIO, Tee(sys.stderr, log))
    sys.argv = [str(ROOT / "train.py"), *argv]
    runpy.run_path(sys.argv[0], run_name="__main__")  # ends the process: end_process of training/log.py
    return 0


LINES_KEPT = 10_000  # in memory while the log cannot be written


class LogFile:
    """Appends to a file of a run once the run's folder exists, so that a launch with bad input creates no file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._early: list[str] = []
        # reentrant: Python prints the error of a __del__, which garbage collection may call in the middle of `write`
        self._lock = threading.RLock()

    def write(self, text: str) -> None:
        """Appends `text` without terminal control codes; ignores progress bars, which start with a carriage return."""
        if text.startswith("\r"):
            return
        with self._lock:
            self._early.append(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text))
            with suppress(OSError):  # a full disk: written by a later call, when there is space again
                if self._file is None and not self._path.parent.parent.is_dir():
                    return
                if self._file is None:
                    self._path.parent.mkdir(exist_ok=True)
                    self._file = self._path.open("ab", buffering=0)
                self._early, early = [], self._early  # a call in the middle of this one writes only its own line
                try:
                    pending = "".join(early).encode(errors="replace")
                    rest = pending[self._file.write(pending) :]
                    early = [rest.decode(errors="replace")] if rest else []
                finally:
                    self._early[:0] = early
            del self._early[:-LINES_KEPT]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Tee:
    """A standard stream whose text also goes into the log. All other attributes, such as isatty, are those of the stream."""

    def __init__(self, stream: TextIO, log: LogFile) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


if __name__ == "__main__":
    open_closed_streams()
    handle_early_stop()
    gc.disable()  # imports leave no garbage; run_here: train.py enables it
    end_program(main(sys.argv[1:]))
