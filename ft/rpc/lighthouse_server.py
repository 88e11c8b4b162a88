"""A lighthouse that runs: where it listens, what it remembers, and one in a thread for tests and small jobs.

`serve` runs one on this loop (lighthouse_main.py is its command line), LighthouseServer runs one in a thread. No torch here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ft.protocol import messages as m
from ft.protocol.lighthouse import LighthouseConfig
from ft.rpc import state_file
from ft.rpc.access import Access, Endpoint, endpoints, try_to_listen
from ft.rpc.driver import Driver, Seen
from ft.rpc.lighthouse_service import LighthouseService
from ft.rpc.serving import listen

log = logging.getLogger("pharos.lighthouse")


@dataclass(frozen=True)
class Place:
    """A lighthouse's addresses, access and state file."""

    at: Sequence[Endpoint]
    access: Access = field(default_factory=Access)
    state: Path | None = None
    lower_terms: bool = False  # the config's count, though the state's may be higher
    recover: bool = False  # no state file: wait for the reports of a job that may be running


@asynccontextmanager
async def serve(
    config: LighthouseConfig, place: Place, *, seen: Seen | None = None
) -> AsyncIterator[tuple[LighthouseService, int]]:
    """The service and its port. Raises ValueError: a port or file that cannot be used. Whoever uses it also runs service.driver.run(),
    which raises state_file.TakenOver when another one goes on from the same file."""
    for at in place.at:
        if at.port:
            try_to_listen(at)  # before the state is taken over: whoever listens there already goes on with it
    owner, trouble = _take_over(place.state) if place.state else ("", "")
    saved = _read_state(place)
    keeper = state_file.StateFileWriter(place.state, owner, saved, trouble=trouble) if place.state else None
    service = LighthouseService(
        config,
        keeper=keeper,
        saved=saved and state_file.reserved(saved),
        fresh=not place.recover,
        lower_terms=place.lower_terms,
        seen=seen,
    )
    server, port = listen(place.access, service.routes, place.at)
    await server.start()
    try:
        yield service, port
    finally:
        service.stops = True
        await server.stop()
        if keeper:
            await keeper.close()


def _take_over(state: Path) -> tuple[str, str]:
    """Its name as the owner, and why it could not become that yet. Raises ValueError where no time will help."""
    try:
        return state_file.take_over(state), ""
    except OSError as error:
        if error.errno in state_file.PASSING:
            log.error("nothing can be kept in %s, no new quorum is answered until it can: %s", state.parent, error)
            return "", str(error)
        raise ValueError(f"--state_file {state}: cannot be written: {error.strerror}") from None


def _read_state(place: Place) -> m.Saved | None:
    try:
        return state_file.read_or_refuse(place.state) if place.state else None
    except ValueError as error:
        if not place.recover:
            raise
        log.warning("%s", error)
        return None


class LighthouseServer:
    """A lighthouse in a thread of this process, without a state file unless one is named: for tests, and for one machine. torchft's face.

    Without a token and `insecure` it listens on loopback, whatever address `bind` names. Raises ValueError where it cannot listen.
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
        self._ready: asyncio.Future[int] | None = None
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._port = 0
        self._host = asked.host if safe and not asked.wildcard else socket.gethostname() if safe else "localhost"
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(config, Place(at, access, state), seen)),
            name="lighthouse",
            daemon=True,
        )
        self._thread.start()
        self._started.wait()
        if self._error:
            raise self._error

    def address(self) -> str:
        return f"http://{Endpoint(self._host, self._port)}"

    def shutdown(self) -> None:
        """Waiting calls fail, the port is free again. May be called twice."""
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=10)

    async def _run(self, config: LighthouseConfig, place: Place, seen: Seen | None) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with serve(config, place, seen=seen) as (service, self._port):
                self._started.set()
                await until_stopped(service.driver, self._stop)
        except BaseException as error:
            if self._started.is_set():
                raise  # nobody waits for it any more: the thread's last words
            self._error = error
        finally:
            self._started.set()


async def until_stopped(driver: Driver, stop: asyncio.Event) -> None:
    """Runs the driver's ticks until `stop` is set. Raises what the driver raises."""
    tasks = [asyncio.ensure_future(driver.run()), asyncio.ensure_future(stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
