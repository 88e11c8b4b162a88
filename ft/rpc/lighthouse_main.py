"""The lighthouse's program: python ft/rpc/lighthouse_main.py --min_replicas 2 (or ./scripts/run_lighthouse.sh).

Prints its address on stdout, then that of its dashboard if it has one; everything else goes to stderr. No torch here.
Exit code: 0 after SIGTERM or SIGINT, 128 + n after a second signal n, 2 for bad input (one line), else 1. ft/compat/lighthouse.py runs
`serve` in a thread.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

if __name__ == "__main__":  # run by path, from any folder: `-m` would take the `ft` of the working folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from ft.rpc.access import Access, Endpoint, try_to_listen
from ft.rpc.driver import Driver, Observer
from ft.rpc.lighthouse_flags import LighthouseOptions, complain, read_options
from ft.rpc.lighthouse_service import LighthouseService
from ft.rpc.serving import Server
from ft.rpc.state_file import StateFileWriter, Superseded, reserved
from ft.rpc.stderr_log import log_to_stderr

AGAIN_S = 2.0  # a signal that comes so long after the first one ends the process at once
log = logging.getLogger("pharos.lighthouse")


def main(argv: Sequence[str]) -> int:
    try:
        options = read_options(argv)
        log_to_stderr("lighthouse")
        logging.getLogger("aiohttp").setLevel(logging.WARNING)
        asyncio.run(_run(options))
    except ValueError as error:
        return complain(error)
    except Superseded as error:
        log.error("%s: this one ends", error)
        return 1
    return 0


async def _run(options: LighthouseOptions) -> None:
    stop, loop, stopped_s = asyncio.Event(), asyncio.get_running_loop(), list[float]()

    def on_signal(number: int) -> None:
        """Stops, or ends the process at once: the end waits for a write of the state file, and its disk may hang."""
        if not stop.is_set():
            stopped_s.append(loop.time())
            stop.set()
        elif loop.time() - stopped_s[0] >= AGAIN_S:
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    async with AsyncExitStack() as stack:
        service, port = await stack.enter_async_context(serve(options))
        _say_where(options, port)
        gc.set_threshold(10_000)  # default: 1,000 requests would start a collection forty times, which finds nothing
        if options.http:
            # imported only when the lighthouse answers, and in a thread: it takes longer to import than all other modules
            pages = await asyncio.to_thread(importlib.import_module, "ft.dashboard.server")
            must = options.http_asked
            at = [Endpoint(place.host, place.port or (0 if must else port + 1)) for place in options.http]
            page = await stack.enter_async_context(pages.serve_http(service, options.access, at, must=must))
            if page:
                _print(_address(page, options.access))
        await until_stopped(service.driver, stop)


def _say_where(options: LighthouseOptions, port: int) -> None:
    if options.access.token:
        who = "every holder of the token"
    elif options.access.insecure:
        who = "every machine that reaches it (--insecure)"
    else:
        who = "this machine only, since there is no token (--token_file FILE or --insecure opens it to others)"
    where = " and ".join(str(Endpoint(at.host, port)) for at in options.at)
    state = f"state in {options.state}" if options.state else "no state file"
    log.info("listens on %s for %s; %s", where, who, state)
    _print(_address(Endpoint(options.at[0].host, port), options.access))


def _print(line: str) -> None:
    """Prints a line. A reader that needed only the first one, such as `read address < pipe`, may have gone."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # which Python flushes at its end


def _address(at: Endpoint, access: Access) -> str:
    """Returns the URL at which others reach the server at `at`."""
    host = socket.gethostname() if at.wildcard else at.host
    return f"{'https' if access.tls else 'http'}://{Endpoint(host, at.port)}"


@asynccontextmanager
async def serve(
    options: LighthouseOptions, *, observer: Observer | None = None, writer: type[StateFileWriter] = StateFileWriter
) -> AsyncIterator[tuple[LighthouseService, int]]:
    """Yields the service and its port. Raises ValueError for an unusable port or file. The caller must also run service.driver.run(), which
    raises Superseded when a different lighthouse continues from the same state file."""
    for at in options.at:
        if at.port:
            try_to_listen(at)  # before the state file is acquired: a lighthouse that listens there already must keep it
    state_writer, saved = writer.begin(options.state, recover=options.recover) if options.state else (None, None)
    service = LighthouseService(
        options.config,
        state_writer=state_writer,
        saved=saved and reserved(saved),
        recover=options.recover,
        lower_limits=options.lower_limits,
        observer=observer,
    )
    server = Server(options.access, service.routes, options.at, on_denied=service.on_denied)
    await server.start()
    try:
        yield service, server.port
    finally:
        service.stops = True
        await server.stop()
        if state_writer:
            await state_writer.close()


async def until_stopped(driver: Driver, stop: asyncio.Event) -> None:
    """Runs the driver until `stop` is set. Raises what the driver raises."""
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
