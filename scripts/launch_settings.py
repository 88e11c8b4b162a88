"""Reads and checks the environment variables of run_train.sh: ranks, nodes, restarts, grace time."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

RESTARTS_WITHIN_S = 24 * 3600.0
SHORT_RUN_S, MAX_SHORT_RUNS = 30.0, 6  # after this many short runs in a row nothing is restarted
STOPPED_EARLY = 128 + signal.SIGTERM  # exit code of a group that a supervisor stops while no step is under way
FLUSH_S = 1.0  # for the console to take the last lines of a launcher
RESTART_S = 1.0  # delay before a restart; doubles with each consecutive short run
LIFELINE = Path(__file__).resolve().parent / "lib" / "lifeline.py"


def say(text: str) -> None:
    """Prints a line for the user, if that is possible: the reader of a pipe (`| head`) may have gone, or the disk may be full."""
    with suppress(OSError, ValueError):
        print(f"pharos: {text}", file=sys.stderr, flush=True)


def stopped_early(number: int) -> str:
    return f"stopped by {signal.Signals(number).name} while no step was under way"


def handle_early_stop() -> None:
    """Lets Ctrl-C and SIGTERM end this process with one line, and SIGUSR1 do nothing, as nothing is to be saved yet, until train.py or a
    supervisor installs its own handlers."""

    def end(number: int, frame: object) -> None:
        with suppress(OSError):  # not through sys.stderr, which this thread may be writing to; and not into a full pipe
            if select.select([], [2], [], 0)[1]:
                os.write(2, f"pharos: {stopped_early(number)}\n".encode())
        os._exit(128 + number)

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:  # as in the background of a shell script
            signal.signal(number, end)


def open_closed_streams() -> None:
    """Opens os.devnull in place of standard streams that the caller has closed: code expects streams, and files would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)  # also if dup2 had nothing to do
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def end_program(code: int) -> NoReturn:
    """Ends this program with `code`, also if the reader of its output has gone (`| head`, `| tee` after Ctrl-C): when Python's own flush at
    the end fails, its code is 120. Also if another thread waits for a console that takes nothing: the flush would wait for that thread.
    A stop signal that comes late ends it at once, with the same code, as in end_process of training/log.py."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup
            signal.signal(number, lambda *_: os._exit(code))

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # noqa: PERF203 (of two streams)
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    flushing = threading.Thread(target=flush, daemon=True)
    with suppress(RuntimeError):  # no thread is left
        flushing.start()
        flushing.join(FLUSH_S)
        if flushing.is_alive():
            os._exit(code)
    sys.exit(code)


def how_ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


def under_lifeline(command: Sequence[str], number: signal.Signals) -> list[str]:
    """Returns the command that runs `command`, which gets signal `number` if this process dies before it (Linux)."""
    return [sys.executable, "-IS", str(LIFELINE), str(os.getpid()), number.name, *command]


def forget_old(restarted_at_s: list[float], now_s: float) -> int:
    """Removes restarts older than RESTARTS_WITHIN_S from the list of their times, as daily preemptions end no job; returns how many."""
    old = sum(now_s - at_s >= RESTARTS_WITHIN_S for at_s in restarted_at_s)
    del restarted_at_s[:old]
    return old


def restart_delay_s(short_runs: int) -> float:
    """Returns the delay before a restart, after that many short runs in a row."""
    return RESTART_S * 2 ** max(0, short_runs - 1)


@dataclass(frozen=True)
class LaunchSettings:
    nproc: int | None  # ranks on this node; None: one per visible GPU, else 1
    nnodes: int
    node_rank: int | None  # None: in order of arrival
    endpoint: str  # an IPv6 address without brackets
    log_ranks: frozenset[int] | None  # global ranks whose output is shown; None: all
    max_restarts: int
    grace_s: float

    @staticmethod
    def read(env: Mapping[str, str]) -> LaunchSettings:
        """Reads the variables. Raises ValueError: one has a bad value or is missing."""
        if "NPROC" in env and "NGPU" in env and env["NPROC"] != env["NGPU"]:
            raise ValueError(f"NPROC={env['NPROC']}: differs from its alias NGPU={env['NGPU']}; set one of them")
        nproc = "NPROC" if "NPROC" in env else "NGPU"
        nnodes = whole(env, "NNODES", least=1, default=1)
        settings = LaunchSettings(
            nproc=whole(env, nproc, least=1) if nproc in env else None,
            nnodes=nnodes,
            node_rank=whole(env, "NODE_RANK", least=0, below=nnodes) if "NODE_RANK" in env and nnodes > 1 else None,
            endpoint=re.sub(r"^\[(.+)\](:\d+)$", r"\1\2", env.get("RDZV_ENDPOINT", "")),
            log_ranks=_ranks(env.get("LOG_RANK", "0")),
            max_restarts=whole(env, "MAX_RESTARTS", least=0, default=0),
            grace_s=whole(env, "STOP_GRACE", least=0, default=120),
        )
        if nnodes > 1 and not re.fullmatch(r".+:\d+", settings.endpoint):
            raise ValueError(f"RDZV_ENDPOINT={settings.endpoint}: with NNODES={nnodes} it must be host:port of node 0")
        return settings


def whole(env: Mapping[str, str], name: str, *, least: int, below: int | None = None, default: int = 0) -> int:
    """Returns the value of an integer environment variable. Raises ValueError: not an integer in the legal range."""
    text = env.get(name, str(default))
    legal = f"must be a whole number from {least}" + (f" to {below - 1}" if below is not None else "")
    if not text.isdecimal() or int(text) < least or (below is not None and int(text) >= below):
        raise ValueError(f"{name}={text}: {legal}")
    return int(text)


def _ranks(text: str) -> frozenset[int] | None:
    if text == "all":
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f'LOG_RANK={text}: must be ranks such as "0" or "0,3", or "all"')
    return frozenset(int(rank) for rank in text.split(","))
