"""The process group of a replica group, and its rendezvous: `comm.init_method` and the store.

Reads torchelastic's variables (RANK, WORLD_SIZE, LOCAL_RANK), as ft/config.py does."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import SplitResult, urlsplit

import torch
import torch.distributed as dist

from parallelisms.device import Device, pick_device

BACKENDS = ("gloo", "nccl", "mpi")
ENV = "env://"
FALLBACK_MARGIN_S = 60  # added to the longest timeout for collectives, so that the watchdog reports a hang first


def why_unusable(backend: str) -> str:
    """Returns why this machine's torch cannot use `backend`, or ""."""
    if not getattr(dist, f"is_{backend}_available")():
        return f"this torch ({torch.__version__}) was built without it"
    lacks_cuda = backend == "nccl" and not torch.cuda.is_available()
    return "it needs a CUDA device, and there is none here" if lacks_cuda else ""


@dataclass(frozen=True)
class CommConfig:
    """[comm]: backend, rendezvous and timeouts."""

    backend: Annotated[
        Literal["auto", "gloo", "nccl", "mpi"], "backend of the process group; auto: nccl on GPUs, else gloo"
    ] = "auto"
    init_method: Annotated[
        str,
        "rendezvous: env:// (from the launcher), file:///path (on a shared disk; ranks make the file), tcp://host:port (of rank 0)",
    ] = ENV
    init_timeout_seconds: Annotated[
        int,
        "timeout of the rendezvous, the first step, and each load, checkpoint, validation, trace and text sample, seconds. Two loads may "
        "take longer: a copy from an object store, while bytes arrive; the load at the start of a run without replica groups, 30 minutes",
        ">= 1",
    ] = 300
    train_timeout_seconds: Annotated[
        int,
        "timeout of later steps, seconds, not counting waits for other groups; then the hang is reported and the run ends",
        ">= 1",
    ] = 100
    trace_buf_size: Annotated[int, "collectives in the flight recorder's buffer; 0: off", ">= 0"] = 20_000

    def check(self) -> None:
        if self.backend != "auto" and (cause := why_unusable(self.backend)):
            usable = [f'"{name}"' for name in BACKENDS if not why_unusable(name)]
            raise ValueError(f'comm.backend = "{self.backend}": {cause}; legal here: "auto", {", ".join(usable)}')
        try:
            url = parse_init_method(self.init_method)
            if url.scheme == "file":
                file = Path(url.path)
                if not file.parent.is_dir():
                    raise ValueError(f"there is no folder {file.parent}")
                if file.is_dir():
                    raise ValueError(f"{file} is a folder")
                if file.exists():
                    with file.open("rb") as stream:
                        begin = stream.read(16)
                    if begin and b"refcount/" not in begin:  # torch's first key
                        raise ValueError("the file has other content; name a new one")
        except (OSError, ValueError) as error:
            raise ValueError(
                f'comm.init_method = "{self.init_method}": {error}; it takes "env://", "file:///path/on/a/shared/disk" or '
                f'"tcp://host:port" of rank 0; nearest: "{ENV}"'
            ) from None
        if self.train_timeout_seconds > self.init_timeout_seconds:
            raise ValueError(
                f"comm.train_timeout_seconds = {self.train_timeout_seconds}: must not exceed comm.init_timeout_seconds = "
                f"{self.init_timeout_seconds}, which covers the slower first step; nearest: {self.init_timeout_seconds}"
            )


def parse_init_method(text: str) -> SplitResult:
    """Parses one of torch's three init methods (torch.distributed, "Initialization"). Raises ValueError with a short cause."""
    url = urlsplit(text)
    if url.query or url.fragment:
        raise ValueError(f"?{url.query or url.fragment} is not supported: the launcher assigns the ranks")
    if url.scheme == "file" and (url.netloc or not url.path.startswith("/") or url.path == "/"):
        raise ValueError("a file needs three slashes: file:///absolute/path")
    if url.scheme == "tcp":
        try:
            complete = bool(url.hostname and url.port and not url.path)
        except ValueError:  # the port is above 65535 or not a number
            complete = False
        if not complete:
            raise ValueError("must be tcp://host:port with a port from 1 to 65535")
    elif text != ENV and url.scheme != "file":
        raise ValueError("unknown scheme")
    return url


def open_store(
    init_method: str, *, global_rank: int, world_size: int, timeout_s: float, environ: Mapping[str, str] = os.environ
) -> dist.Store:
    """Connects to the store for `world_size` ranks, within `timeout_s`. For env:// the store may be hosted by torchelastic's agent; else
    rank 0 hosts it. Raises ValueError (env:// without MASTER_ADDR and MASTER_PORT), torch's DistError, RuntimeError (the port is used)."""
    url = parse_init_method(init_method)
    if url.scheme == "file":
        # The store is given no number of users: the last of them would remove the file, while restarted ranks of other nodes already meet
        # in it.
        return dist.FileStore(url.path)
    host, port, serves = url.hostname, url.port, global_rank == 0
    if url.scheme == "env":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        if missing:
            raise ValueError(f"env:// needs {' and '.join(missing)} in the environment; launchers set them")
        host, port = environ["MASTER_ADDR"], _whole_number("MASTER_PORT", environ["MASTER_PORT"])
        serves = serves and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    assert host and port is not None
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, serves, timeout, wait_for_workers=False, multi_tenant=True)


def launch_store(store: dist.Store, *, global_rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Returns a view of `store` that only the processes of this launch share: torchelastic's agent keeps its store over restarts, with the
    addresses of killed ranks. Each rank publishes an id; the ids together name the view, once every rank has read the same ones."""
    own, keys, counted = secrets.token_hex(8), [f"launch/{rank}" for rank in range(world_size)], set[str]()
    deadline_s = time.monotonic() + timeout_s
    store.set(keys[global_rank], own)
    many = store.has_extended_api()  # type: ignore[attr-defined]  # a FileStore has none
    while True:
        ids = store.multi_get(keys) if many else [store.get(key) for key in keys]
        view = hashlib.sha256(b"".join(ids)).hexdigest()
        readers = store.add(view, int(view not in counted and own.encode() in ids))
        counted.add(view)
        if readers == world_size:
            return dist.PrefixStore(view, store)
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{readers} of {world_size} ranks have joined this launch after {timeout_s:g} s")
        time.sleep(0.05)


@dataclass(frozen=True)
class World:
    """This rank's process group: rank, size, device and store. `global_rank`: torch's rank, within this replica group and
    over all axes of its mesh (in ft/: group_rank; in the log: the number after the group)."""

    global_rank: int
    world_size: int
    device: Device
    store: dist.Store
    watch_store: dist.Store  # a separate connection for the watchdog, while the loop may block in `store`


def launched_rank() -> int:
    """Returns the global rank from the launcher; 0 for a plain `python train.py`. Raises ValueError."""
    return _whole_number("RANK", os.environ.get("RANK", "0"))


def launched_world_size() -> int:
    """Returns the number of ranks from the launcher; 1 for a plain `python train.py`. Raises ValueError."""
    return _whole_number("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))


def _whole_number(name: str, text: str) -> int:
    if not re.fullmatch("[0-9]+", text):
        raise ValueError(f"{name} = {text}: must be a whole number; launchers set it")
    return int(text)


@contextmanager
def process_group(config: CommConfig) -> Iterator[World]:
    """Joins the process group that the launcher's variables describe; without them, a group of one rank that needs no network. Its timeout
    is a fallback: the watchdog ends a hang sooner (training/watchdog.py)."""
    global_rank, world_size = launched_rank(), launched_world_size()
    device = pick_device(_whole_number("LOCAL_RANK", os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=config.init_timeout_seconds + FALLBACK_MARGIN_S)
    store: dist.Store = dist.HashStore()
    if world_size > 1:
        limit_s = timeout.total_seconds()
        store = open_store(config.init_method, global_rank=global_rank, world_size=world_size, timeout_s=limit_s)
        store.set_timeout(timeout)
        store = launch_store(store, global_rank=global_rank, world_size=world_size, timeout_s=limit_s)
    backend = config.backend if config.backend != "auto" else device.traits.backend
    init_default_group(backend, store, global_rank=global_rank, world_size=world_size, timeout=timeout)
    try:
        store = dist.PrefixStore("pharos", store)
        yield World(global_rank, world_size, device, store, store.clone())  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()


def init_default_group(
    backend: str, store: dist.Store, *, global_rank: int, world_size: int, timeout: timedelta
) -> None:
    """Creates the default process group. MPI has its own rendezvous and uses no store."""
    if backend == "mpi":
        dist.init_process_group("mpi", timeout=timeout)
    else:
        dist.init_process_group(backend, store=store, rank=global_rank, world_size=world_size, timeout=timeout)


def gather_texts(world: World, topic: str, text: str) -> list[str]:
    """Returns the texts of all ranks on `topic`; every rank calls it, and may call it again for the same topic. Uses the store, which works
    when collectives may not."""
    turn = world.store.add(f"{topic}/{world.global_rank}/calls", 1)
    world.store.set(f"{topic}/{turn}/{world.global_rank}", text)
    return [world.store.get(f"{topic}/{turn}/{rank}").decode() for rank in range(world.world_size)]
