"""Starts a group's server as a child of this process (the group's rank 0) and ends it with it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ft.children import unsignalled

if TYPE_CHECKING:
    from ft.rpc.group_server import Settings

ROOT = Path(__file__).resolve().parents[2]
START_S = 30.0


class GroupProcess:
    """Raises RuntimeError where it cannot start.

    It dies with this process, by two ways: the pipe of its stdin, which only we hold, and, if it was started from the main thread, the
    kernel's parent-death signal (that of the *thread* that started it, which is why no other thread may ask for it).
    """

    def __init__(self, settings: Settings) -> None:
        main = threading.current_thread() is threading.main_thread()
        # Its own session, and without its signals: a Ctrl-C or a SIGTERM for the group is the trainer's to answer, with a Leave.
        with unsignalled():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ft.rpc.group_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
                start_new_session=True,
            )
        assert self._process.stdin
        self._process.stdin.write(replace(settings, parent=os.getpid() if main else 0).to_json().encode() + b"\n")
        self._process.stdin.flush()
        self.address = self._read_address()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends it: the group's ranks must have left, or be gone. May be called twice."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read_address(self) -> str:
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:  # select() itself knows no descriptor above 1023
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(START_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self._process.kill()
            code = self._process.wait()
            raise RuntimeError(
                f"the group server did not start in {START_S:g} s (exit code {code}); its words are on stderr"
            )
        return str(json.loads(line)["address"])
