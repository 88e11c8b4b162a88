"""torchft itself, from PyPI, for the tests that put its clients and servers beside ours.

It never enters the project's environment: `install` puts the wheel, and what its Python part imports besides, into a folder of their own
(.venv-torchft, once), and only processes that are given that folder see it:

    Peer                 one process that has torchft's Rust extension (clients and servers), without torch
    torchft_trainer.py   a training job of torchft's Manager
    torchft_shim.py      torchft's own tests, with our lighthouse

ScriptedLighthouse is the opposite: no rules at all, so that a group's server can be asked about any quorum.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import grpc

from ft.rpc.generated import torchft_pb2
from tests.rpc.wire import WAIT_S
from tests.system_packages import Unavailable, once

ROOT = Path(__file__).resolve().parents[2]
SOON = timedelta(seconds=WAIT_S)
# torchft imports OpenTelemetry's log exporter, used or not. What that needs in turn (requests, protobuf) is in requirements.lock.
PINS = (
    "torchft-nightly==2026.10.26",
    "opentelemetry-api==1.45.2",
    "opentelemetry-sdk==1.45.2",
    "opentelemetry-proto==1.45.2",
    "opentelemetry-exporter-otlp-proto-common==1.45.2",
    "opentelemetry-exporter-otlp-proto-http==1.45.2",
    "opentelemetry-exporter-otlp-common==0.66b2",
    "opentelemetry-exporter-http-transport==0.66b2",
    "opentelemetry-semantic-conventions==0.66b2",
    "parameterized==0.9.0",  # its tests
)
INSTALL_S = 150.0
R = TypeVar("R")


# ------------------------------------------------------------------------------------------------ the wheel


def install(cache: Path = ROOT / ".venv-torchft", pins: Sequence[str] = PINS, built: Sequence[str] = ()) -> Path:
    """The folder with torchft, or with other `pins`; the first call of this Python fills it. It appears whole or not at all. `built`: names
    of packages of Python alone that have no wheel. Raises Unavailable."""
    digest = hashlib.sha256("\n".join(pins).encode()).hexdigest()[:8]
    folder = cache / f"{sys.implementation.cache_tag}-{digest}"
    return once(folder, lambda: _fill(folder, pins, built))


def _fill(folder: Path, pins: Sequence[str], built: Sequence[str]) -> None:
    if os.environ.get("PHAROS_NO_INSTALL") == "1":
        raise Unavailable("PHAROS_NO_INSTALL=1, and it was not installed before")
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        target = Path(temporary, "new")
        pip = [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
        sources = ["--no-compile", "--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "15"]
        sources += [f"--no-binary={name}" for name in built]
        command = [*pip, *sources, "--target", target, *pins]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"pip took longer than {INSTALL_S:g} s") from None
        if done.returncode:
            raise Unavailable(_why(done.stderr))
        target.rename(folder)


def _why(errors: str) -> str:
    """Returns pip's last error, and its cause: without a network, pip also reports that no version was found."""
    last = next((line for line in reversed(errors.splitlines()) if line.startswith("ERROR")), errors.strip()[-200:])
    unreached = any(word in errors for word in ("Retrying", "onnection", "timed out", "ProxyError", "SSLError"))
    where = f"CPython {sys.version_info[0]}.{sys.version_info[1]} on {sys.platform}"
    return f"{'no package index reached' if unreached else f'no wheel for {where}'} ({last.removeprefix('ERROR: ')})"


# ------------------------------------------------------------------------------------------------ its process


class Peer:
    """A process with torchft's extension. What runs there gets it as the first argument: no name of torchft is imported here."""

    def __init__(self, folder: Path) -> None:
        self._process = ProcessPoolExecutor(1, get_context("spawn"), _load, (folder,))

    def run(self, function: Callable[..., R], *args: Any) -> R:
        """Returns `function(torchft, *args)`, which must be at module level. Raises what it raises."""
        return self._process.submit(_call, function, args).result(WAIT_S * 2)

    @contextmanager
    def lighthouse(self, min_replicas: int, **options: int) -> Iterator[str]:
        """Starts torchft's lighthouse; yields its address."""
        address = self.run(_start, "LighthouseServer", {"bind": "127.0.0.1:0", "min_replicas": min_replicas, **options})
        try:
            yield f"http://127.0.0.1:{address.rpartition(':')[2]}"  # it names the machine, which need not resolve
        finally:
            self.run(_stop, address)

    @contextmanager
    def group(self, replica_id: str, lighthouse: str, *, world_size: int = 2, retries: int = 0) -> Iterator[str]:
        """Starts torchft's ManagerServer; yields its address."""
        settings = {
            "replica_id": replica_id,
            "lighthouse_addr": lighthouse,
            "hostname": "127.0.0.1",
            "bind": "127.0.0.1:0",
            "store_addr": f"{replica_id}:1",
            "world_size": world_size,
            "heartbeat_interval": timedelta(milliseconds=100),
            "connect_timeout": SOON,
            "quorum_retries": retries,
        }
        address = self.run(_start, "ManagerServer", settings)
        try:
            yield address
        finally:
            self.run(_stop, address)

    def close(self) -> None:
        self._process.shutdown()


_torchft: Any = None  # from here on in the peer's process alone
_servers: dict[str, Any] = {}


def _load(folder: Path) -> None:
    """The extension alone: the package around it would load torch."""
    global _torchft
    [file] = (folder / "torchft").glob("_torchft*.so")
    loader = importlib.machinery.ExtensionFileLoader("_torchft", str(file))
    spec = importlib.util.spec_from_loader("_torchft", loader)
    assert spec
    _torchft = importlib.util.module_from_spec(spec)
    loader.exec_module(_torchft)


def _call(function: Callable[..., R], args: tuple[Any, ...]) -> R:
    return function(_torchft, *args)


def _start(torchft: Any, kind: str, options: dict[str, Any]) -> str:
    server = getattr(torchft, kind)(**options)
    _servers[server.address()] = server
    return str(server.address())


def _stop(torchft: Any, address: str) -> None:
    _servers.pop(address).shutdown()


# ------------------------------------------------------------------------------------------------ no rules


class ScriptedLighthouse:
    """Answers each Quorum call with `quorum`; the next `failures` of them fail. Counts the beats."""

    def __init__(self) -> None:
        self.beats: queue.Queue[str] = queue.Queue()
        self.quorum = torchft_pb2.Quorum()
        self.failures = 0
        self._server = grpc.server(ThreadPoolExecutor(4))
        answers = {"Quorum": self._answer, "Heartbeat": self._beat}
        handlers = {name: grpc.unary_unary_rpc_method_handler(answer) for name, answer in answers.items()}
        routes = grpc.method_handlers_generic_handler("torchft.LighthouseService", handlers)
        self._server.add_generic_rpc_handlers((routes,))
        self.address = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _answer(self, request: bytes, context: Any) -> bytes:
        if self.failures:
            self.failures -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "as the script says")
        return bytes(torchft_pb2.LighthouseQuorumResponse(quorum=self.quorum).SerializeToString())

    def _beat(self, request: bytes, context: Any) -> bytes:
        self.beats.put(torchft_pb2.LighthouseHeartbeatRequest.FromString(request).replica_id)
        return b""

    def close(self) -> None:
        self._server.stop(None)
