"""The command line of the lighthouse: python -m ft.rpc.lighthouse_main --min_replicas 2 (or ./scripts/run_lighthouse.sh).

Prints its address on stdout, and then its page's where it has one; everything else on stderr.
Exit code: 0 after SIGTERM or SIGINT, 2 for bad input (one line), 1 the rest.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from ft.rpc.access import Access, Endpoint
from ft.rpc.lighthouse_flags import Options, complain, read_options
from ft.rpc.lighthouse_server import Place, serve, until_stopped
from ft.rpc.lighthouse_service import LighthouseService
from ft.rpc.state_file import TakenOver


def main(argv: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s lighthouse: %(message)s")
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    try:
        options = read_options(argv)
        asyncio.run(_run(options))
    except ValueError as error:
        return complain(error)
    except TakenOver as error:
        print(f"lighthouse: {error}: this one ends", file=sys.stderr)
        return 1
    return 0


async def _run(options: Options) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        place = Place(options.at, options.access, options.state, options.lower_terms, options.recover)
        service, port = await stack.enter_async_context(serve(options.config, place))
        _say_where(place, port)
        gc.set_threshold(10_000)  # or a round of 1,000 calls would set it off forty times, to find nothing
        if options.http:
            # loaded now, when the lighthouse already answers, and aside: it takes longer to load than all the rest
            await asyncio.to_thread(importlib.import_module, "ft.rpc.lighthouse_http")
            page = await stack.enter_async_context(_http(options, service, port))
            if page:
                print(_address(Endpoint(options.http[0].host, page), options.access), flush=True)
        await until_stopped(service.driver, stop)


def _http(options: Options, service: LighthouseService, port: int) -> AbstractAsyncContextManager[int]:
    from ft.rpc.lighthouse_http import serve_http

    at = [Endpoint(place.host, place.port or (0 if options.http_asked else port + 1)) for place in options.http]
    return serve_http(service, options.access, at, must=options.http_asked)


def _say_where(place: Place, port: int) -> None:
    where = " and ".join(str(Endpoint(at.host, port)) for at in place.at)
    if place.access.token:
        who = "whoever has the token"
    elif place.access.insecure:
        who = "whoever reaches it (--insecure)"
    else:
        who = "this machine alone, for there is no token (--token_file FILE, or --insecure, opens it)"
    state = f"state in {place.state}" if place.state else "no state file"
    print(f"lighthouse: listens on {where} for {who}; {state}", file=sys.stderr)
    print(_address(Endpoint(place.at[0].host, port), place.access), flush=True)


def _address(at: Endpoint, access: Access) -> str:
    """The URL that others reach it by."""
    host = socket.gethostname() if at.wildcard else at.host
    return f"{'https' if access.tls else 'http'}://{Endpoint(host, at.port)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
