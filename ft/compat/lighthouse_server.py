"""torchft's LighthouseServer: a lighthouse in a thread, for tests and for jobs on one machine."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from ft.protocol import messages as m
from ft.protocol.lighthouse import LighthouseConfig
from ft.rpc.access import Access, Endpoint, endpoints
from ft.rpc.driver import Seen
from ft.rpc.lighthouse_flags import LighthouseOptions
from ft.rpc.lighthouse_main import serve, until_stopped


class LighthouseServer:
    """A lighthouse in a thread of this process. `bind`: "host:port", port 0 for any free one. `state`: its state file; None keeps the
    state in memory alone. `seen` gets every event of the lighthouse's state machine with the effects that follow from it.

    Without `token` and `insecure` it listens on loopback alone, whatever address `bind` names. Raises ValueError where it cannot listen.
    """

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int = 100,
        quorum_tick_ms: int = 100,
        heartbeat_timeout_ms: int = 5000,
        *,
        token: str = "",
        insecure: bool = False,
        state: Path | None = None,
        seen: Seen | None = None,
    ) -> None:
        access = Access(token, insecure)
        asked = Endpoint.parse(bind, "bind")
        safe = asked.loopback or token or insecure
        at = [asked] if safe else endpoints(None, asked.port, access)
        config = LighthouseConfig(
            min_replicas=min_replicas,
            join_timeout_s=join_timeout_ms / 1000,
            tick_s=quorum_tick_ms / 1000,
            times=m.Times(heartbeat_timeout_s=heartbeat_timeout_ms / 1000),
        )
        started: Future[int] = Future()
        self._host = asked.host if safe and not asked.wildcard else socket.gethostname() if safe else "localhost"
        run = self._run(LighthouseOptions(config, at, access, state), seen, started)
        self._thread = threading.Thread(target=asyncio.run, args=(run,), name="lighthouse", daemon=True)
        self._thread.start()
        self._port = started.result()

    def address(self) -> str:
        """http://host:port."""
        return f"http://{Endpoint(self._host, self._port)}"

    def shutdown(self) -> None:
        """Fails the calls that wait and frees the port. May be called twice."""
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=10)

    async def _run(self, options: LighthouseOptions, seen: Seen | None, started: Future[int]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with serve(options, seen=seen) as (service, port):
                started.set_result(port)
                await until_stopped(service.driver, self._stop)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)
