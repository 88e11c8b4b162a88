"""A running lighthouse: the addresses that it listens on, and its state file. No torch here.

`serve` runs one on this event loop: for lighthouse_main.py, its command line, and for ft/compat/lighthouse_server.py, in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ft.protocol import messages as m
from ft.protocol.lighthouse import LighthouseConfig
from ft.rpc import state_file
from ft.rpc.access import Access, Endpoint, try_to_listen
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
