"""A running lighthouse, and its command line: python -m ft.rpc.lighthouse_main --min_replicas 2 (or ./scripts/run_lighthouse.sh).

Prints its address on stdout, and then its page's where it has one; everything else on stderr. No torch here.
Exit code: 0 after SIGTERM or SIGINT, 2 for bad input (one line), 1 the rest. ft/compat/lighthouse.py runs `serve` in a thread.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from ft.rpc.access import Access, Endpoint, try_to_listen
from ft.rpc.driver import Driver, Observer
from ft.rpc.lighthouse_flags import LighthouseOptions, complain, read_options
from ft.rpc.lighthouse_service import LighthouseService
from ft.rpc.serving import Server
from ft.rpc.state_file import StateFileWriter, TakenOver, reserved

log = logging.getLogger("pharos.lighthouse")


def main(argv: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s lighthouse: %(message)s")
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    try:
        asyncio.run(_run(read_options(argv)))
    except ValueError as error:
        return complain(error)
    except TakenOver as error:
        print(f"lighthouse: {error}: this one ends", file=sys.stderr)
        return 1
    return 0


async def _run(options: LighthouseOptions) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        service, port = await stack.enter_async_context(serve(options))
        _say_where(options, port)
        gc.set_threshold(10_000)  # or a round of 1,000 calls would set it off forty times, to find nothing
        if options.http:
            # loaded now, when the lighthouse already answers, and aside: it takes longer to load than all the rest
            pages = await asyncio.to_thread(importlib.import_module, "ft.dashboard.server")
            must = options.http_asked
            at = [Endpoint(place.host, place.port or (0 if must else port + 1)) for place in options.http]
            page = await stack.enter_async_context(pages.serve_http(service, options.access, at, must=must))
            if page:
                print(_address(Endpoint(at[0].host, page), options.access), flush=True)
        await until_stopped(service.driver, stop)


def _say_where(options: LighthouseOptions, port: int) -> None:
    if options.access.token:
        who = "whoever has the token"
    elif options.access.insecure:
        who = "whoever reaches it (--insecure)"
    else:
        who = "this machine alone, for there is no token (--token_file FILE, or --insecure, opens it)"
    where = " and ".join(str(Endpoint(at.host, port)) for at in options.at)
    state = f"state in {options.state}" if options.state else "no state file"
    print(f"lighthouse: listens on {where} for {who}; {state}", file=sys.stderr)
    print(_address(Endpoint(options.at[0].host, port), options.access), flush=True)


def _address(at: Endpoint, access: Access) -> str:
    """The URL that others reach it by."""
    host = socket.gethostname() if at.wildcard else at.host
    return f"{'https' if access.tls else 'http'}://{Endpoint(host, at.port)}"


@asynccontextmanager
async def serve(
    options: LighthouseOptions, *, observer: Observer | None = None, writer: type[StateFileWriter] = StateFileWriter
) -> AsyncIterator[tuple[LighthouseService, int]]:
    """The service and its port. Raises ValueError: a port or file that cannot be used. Whoever uses it also runs service.driver.run(),
    which raises TakenOver when another one goes on from the same file."""
    for at in options.at:
        if at.port:
            try_to_listen(at)  # before the state is taken over: whoever listens there already goes on with it
    state_writer, saved = writer.begin(options.state, recover=options.recover) if options.state else (None, None)
    service = LighthouseService(
        options.config,
        state_writer=state_writer,
        saved=saved and reserved(saved),
        fresh=not options.recover,
        lower_terms=options.lower_terms,
        observer=observer,
    )
    server = Server(options.access, service.routes, options.at)
    await server.start()
    try:
        yield service, server.port
    finally:
        service.stops = True
        await server.stop()
        if state_writer:
            await state_writer.close()


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
