"""Starts training on this node: checks everything that can be checked without a rank, then runs the ranks.

    run_train.sh -> here -> train.py, in this very process        one rank: nothing to supervise, torch is loaded once
                         -> agent.py -> lifeline.py -> train.py   more ranks, more nodes, or restarts

Exit code: 0 finished, or saved on SIGTERM or SIGINT; 2 bad input: one message, no rank is started; 1 the rest.
The environment that is read here is listed by `./scripts/run_train.sh --help`.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

ROOT = Path(__file__).resolve().parent.parent
# Run by path, from any folder: our packages first, and not scripts/ itself, whose files could hide a package.
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "scripts"))]

from scripts.plan import LaunchSettings, say  # noqa: E402

if TYPE_CHECKING:
    from configs.schema import RunConfig


def main(argv: list[str]) -> int:
    threads_are_given = "OMP_NUM_THREADS" in os.environ
    try:
        launch_settings = LaunchSettings.read(os.environ)
        set_defaults(os.environ, nproc=launch_settings.nproc or 1)
        if "--explain" in argv:
            from tools.explain.command import main as explain

            return explain(argv)
        from configs.load import load

        config = load(argv)  # brings torch with it, if the file can be read
        nproc = ranks_here(launch_settings)
        alone = nproc == launch_settings.nnodes == 1 and launch_settings.max_restarts == 0
        if not alone:
            check(config, world_size=nproc * launch_settings.nnodes)
    except ValueError as error:
        say(str(error))
        return 2
    from ft.config import Environment, group_folder

    logs = config.run_folder / "logs"
    if config.fault_tolerance.enable:
        logs = group_folder(config.run_folder, config.fault_tolerance, Environment.read(os.environ))
    if alone:
        return run_here(argv, logs)
    if not threads_are_given:  # only now are the GPUs counted
        os.environ["OMP_NUM_THREADS"] = threads_per_rank(nproc)
    from scripts.agent import run_ranks

    return run_ranks([sys.executable, str(ROOT / "train.py"), *argv], launch_settings, nproc=nproc, logs=logs)


def check(config: RunConfig, *, world_size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raises ValueError. With one rank train.py does the same, in this process."""
    from configs.check import check
    from configs.saved import check_saved
    from ft.config import Environment

    check(config, world_size=world_size)
    check_saved(config, config.run_folder, world_size=world_size)
    Environment.read(environ).check(config.fault_tolerance)


def ranks_here(launch_settings: LaunchSettings) -> int:
    """Raises ValueError: more ranks than GPUs; or GPUs that torch cannot use, lest the CPU trains unnoticed."""
    import torch

    if torch.cuda.is_available():
        visible = torch.cuda.device_count()
        if launch_settings.nproc and launch_settings.nproc > visible:
            raise ValueError(f"NPROC={launch_settings.nproc}: more ranks than the {visible} GPUs that are visible here")
        return launch_settings.nproc or visible
    asked_for_none = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1", "NoDevFiles")
    gpus = 0 if asked_for_none else sum(line.startswith("GPU") for line in _nvidia_smi("-L").splitlines())
    if gpus:
        driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
        remedy = (
            "it needs a newer driver, or another build: TORCH_INDEX=https://download.pytorch.org/whl/cu126 "
            "./scripts/run_train.sh ... takes one for older drivers"
            if torch.version.cuda
            else f"it is a CPU build: remove {sys.prefix} and start again on this machine"
        )
        raise ValueError(
            f"nvidia-smi sees {gpus} GPU{'s' * (gpus > 1)} (driver {driver}), but torch {torch.__version__} "
            f"(CUDA {torch.version.cuda or 'none'}) sees none: {remedy}; to train on the CPU all the same: CUDA_VISIBLE_DEVICES=-1"
        )
    return launch_settings.nproc or 1


def _nvidia_smi(*arguments: str) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60).stdout.strip()
    return ""


def set_defaults(env: MutableMapping[str, str], *, nproc: int) -> None:
    """Threads and the CUDA allocator, unless the user has said something. Before torch is imported.

    Not TORCH_NCCL_AVOID_RECORD_STREAMS: torch 2.11 to 2.13 behave as with 1, and call it deprecated where it is set (the constructor in
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
    """
    env.setdefault("OMP_NUM_THREADS", threads_per_rank(nproc))
    # A waiting OpenMP thread spins this often, then sleeps. GNU's default is 300,000: beside other programs the spinning thread keeps
    # the core from the very thread it waits for. Never to spin halves the speed of an idle machine (docs/benchmarks.md).
    env.setdefault("GOMP_SPINCOUNT", "10000")
    # The name that torch 2.11 to 2.13 read first; PYTORCH_CUDA_ALLOC_CONF is the old one (c10/core/AllocatorConfig.h).
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in env:
        env.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def threads_per_rank(nproc: int) -> str:
    return str(max(1, cores_here() // nproc))


def cores_here() -> int:
    """Number of cores that this process may use. A container's quota counts; Python and OpenMP do not look at it."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()  # cgroup v2; "max" is no quota
        cores = min(cores, int(quota) // int(period))
    return cores


def run_here(argv: list[str], logs: Path) -> int:
    """train.py as `python train.py` would run it, its output also in `logs`. Signals and exit code are its own."""
    log = LogFile(logs / "rank0.log")
    sys.stdout, sys.stderr = cast(TextIO, Tee(sys.stdout, log)), cast(TextIO, Tee(sys.stderr, log))
    sys.argv = [str(ROOT / "train.py"), *argv]
    runpy.run_path(sys.argv[0], run_name="__main__")  # ends in sys.exit
    return 0


LINES_KEPT = 10_000  # of a log that cannot be written


class LogFile:
    """Appends to a file of a run once that run has a folder: a start that is refused leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._early: list[str] = []
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        """Without a terminal's control codes, and without progress bars, which start with a carriage return."""
        if text.startswith("\r"):
            return
        with self._lock:
            self._early.append(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text))
            if self._file is None and not self._path.parent.parent.is_dir():
                return
            with suppress(OSError):  # a full disk: it is written with what comes when there is room again
                if self._file is None:
                    self._path.parent.mkdir(exist_ok=True)
                    self._file = self._path.open("ab", buffering=0)
                waits = "".join(self._early).encode(errors="replace")
                rest = waits[self._file.write(waits) :]
                self._early = [rest.decode(errors="replace")] if rest else []
            del self._early[:-LINES_KEPT]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Tee:
    """A standard stream whose text also goes into the log. All else, such as isatty, is the stream's."""

    def __init__(self, stream: TextIO, log: LogFile) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
