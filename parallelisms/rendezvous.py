"""The rendezvous of a group's ranks: `comm.init_method`, read and turned into the store they meet in.

distributed.py (training) and tools/cluster/ (the check of a new cluster) open their store here. Floor 2.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

ENV = "env://"
LEGAL = '"env://", "file:///path/on/a/shared/disk" or "tcp://host:port" of rank 0'


@dataclass(frozen=True)
class InitMethod:
    """One of torch's three ways to meet (torch.distributed, "Initialization")."""

    scheme: str  # env, file or tcp
    host: str = ""  # tcp: where rank 0 listens
    port: int = 0
    path: str = ""  # file

    @staticmethod
    def parse(text: str) -> InitMethod:
        """Raises ValueError: what is wrong with it, in a few words."""
        url = urlsplit(text)
        if url.query or url.fragment:
            raise ValueError(f"takes no ?{url.query or url.fragment}: who is which rank is the launcher's to say")
        if text == ENV:
            return InitMethod("env")
        if url.scheme == "file":
            if url.netloc or not url.path.startswith("/") or url.path == "/":
                raise ValueError("a file is written with three slashes: file:///absolute/path")
            return InitMethod("file", path=url.path)
        if url.scheme == "tcp":
            try:
                host, port = url.hostname or "", url.port or 0
            except ValueError:
                host, port = "", 0
            if not host or not port or url.path:
                raise ValueError("must be tcp://host:port with a port from 1 to 65535")
            return InitMethod("tcp", host=host, port=port)
        raise ValueError("no such way to meet")

    def check(self, *, longest_start_s: float) -> None:
        """Checks what can be seen before any rank starts. Raises ValueError."""
        if self.scheme != "file":
            return
        file = Path(self.path)
        if not file.parent.is_dir():
            raise ValueError(f"there is no folder {file.parent}")
        if file.is_dir():
            raise ValueError(f"{file} is a folder")
        # All ranks of a start come within this time: what is older is of a start that was killed, and its addresses lead nowhere.
        if file.exists() and time.time() - file.stat().st_mtime > longest_start_s:
            raise ValueError("the file is left from an earlier start; remove it, or name another")


def open_store(
    method: InitMethod, *, global_rank: int, world_size: int, timeout_s: float, environ: Mapping[str, str] = os.environ
) -> dist.Store:
    """The store in which `world_size` ranks meet. Returns as soon as it can be reached, whoever else is there already.

    For env:// torchelastic's launchers hold the store themselves, and say so; else rank 0 does. Waits at most `timeout_s`
    for it. Raises ValueError (env:// without MASTER_ADDR and MASTER_PORT), torch's DistError, or RuntimeError (a port that is taken).
    """
    timeout = timedelta(seconds=timeout_s)
    if method.scheme == "file":
        # A restart must not read the addresses of the ranks that died.
        restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.FileStore(method.path + (f".{restarts}" if restarts != "0" else ""), world_size)
    host, port, serves = method.host, method.port, global_rank == 0
    if method.scheme == "env":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        if missing:
            raise ValueError(f"env:// needs {' and '.join(missing)} in the environment; launchers set them")
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        serves = serves and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return dist.TCPStore(host, port, None, serves, timeout, wait_for_workers=False, multi_tenant=True)
