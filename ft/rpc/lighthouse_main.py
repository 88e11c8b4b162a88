"""The command line of the lighthouse: python -m ft.rpc.lighthouse_main --min_replicas 2 (or ./scripts/run_lighthouse.sh).

Prints its address on stdout, everything else on stderr. Exit code: 0 after SIGTERM or SIGINT, 2 for bad input (one line), 1 the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ft.protocol.lighthouse import LighthouseConfig
from ft.protocol.messages import Times
from ft.rpc.access import Access, Endpoint, Tls, check_token, endpoints, read_token, try_to_listen
from ft.rpc.lighthouse_server import LighthouseService, Place, serve, until_stopped

DEFAULT_PORT = 29510
MOST_MS = 24 * 3600 * 1000


@dataclass(frozen=True)
class Options:
    config: LighthouseConfig
    place: Place
    http: Sequence[Endpoint]  # empty: none
    http_asked: bool  # else a taken port is no reason not to start


def main(argv: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s lighthouse: %(message)s")
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    try:
        options = read_options(argv)
        asyncio.run(_run(options))
    except ValueError as error:
        print(f"lighthouse: {error}", file=sys.stderr)
        return 2
    return 0


async def _run(options: Options) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        service, port = await stack.enter_async_context(serve(options.config, options.place))
        _say_where(options.place, port)
        if options.http:
            # loaded now, when the lighthouse already answers, and aside: it takes longer to load than all the rest
            await asyncio.to_thread(importlib.import_module, "ft.rpc.lighthouse_http")
            await stack.enter_async_context(_http(options, service, port))
        await until_stopped(service.driver, stop)


def _http(options: Options, service: LighthouseService, port: int) -> AbstractAsyncContextManager[int]:
    from ft.rpc.lighthouse_http import serve_http

    at = [Endpoint(place.host, place.port or (0 if options.http_asked else port + 1)) for place in options.http]
    return serve_http(service, options.place.access, at, must=options.http_asked)


def _say_where(place: Place, port: int) -> None:
    where = " and ".join(str(Endpoint(at.host, port)) for at in place.at)
    host = socket.gethostname() if place.at[0].wildcard else place.at[0].host
    if place.access.token:
        who = "whoever has the token"
    elif place.access.insecure:
        who = "whoever reaches it (--insecure)"
    else:
        who = "this machine alone, for there is no token (--token_file FILE, or --insecure, opens it)"
    state = f"state in {place.state}" if place.state else "no state file"
    print(f"lighthouse: listens on {where} for {who}; {state}", file=sys.stderr)
    print(f"{'https' if place.access.tls else 'http'}://{Endpoint(host, port)}", flush=True)


# ------------------------------------------------------------------------------------------------ options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def read_options(argv: Sequence[str]) -> Options:
    """Raises ValueError: one line that says what is legal."""
    given = _parser().parse_args(argv)
    if given.min_replicas is None:
        raise ValueError("--min_replicas is missing: the fewest groups that train, 1 or more")
    access = Access(_token(given), given.insecure, _tls(given))
    bind = Endpoint.parse(given.bind, "--bind") if given.bind else None
    at = endpoints(given.bind, bind.port if bind else DEFAULT_PORT, access)
    for place in at:
        try_to_listen(place)
    state = _state_path(given.state_file, at[0].port)
    times = Times(heartbeat_timeout_s=given.heartbeat_timeout_ms / 1000, takeover_s=given.takeover_s)
    config = LighthouseConfig(
        min_replicas=given.min_replicas,
        join_timeout_s=given.join_timeout_ms / 1000,
        tick_s=given.quorum_tick_ms / 1000,
        times=times,
    )
    return Options(
        config, Place(at, access, state, given.recover), _http_at(given.http, at, access), given.http is not None
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="run_lighthouse.sh", description="Tells groups that train together who takes part.", allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--bind",
        metavar="HOST:PORT",
        help=f"default: [::]:{DEFAULT_PORT} with a token or --insecure, else loopback; port 0: a free one",
    )
    add("--min_replicas", metavar="N", type=_whole(1, 1 << 20), help="required: the fewest groups that train")
    add(
        "--join_timeout_ms",
        metavar="MS",
        type=_whole(0, MOST_MS),
        default=60_000,
        help="how long the first caller waits for groups that are alive but have not called; default 60000",
    )
    add(
        "--quorum_tick_ms",
        metavar="MS",
        type=_whole(1, 60_000),
        default=100,
        help="how often waiting calls are looked at; default 100",
    )
    add(
        "--heartbeat_timeout_ms",
        metavar="MS",
        type=_whole(1, MOST_MS),
        default=5000,
        help="a group that is silent for so long is lost; default 5000",
    )
    add(
        "--http",
        metavar="HOST:PORT|none",
        help="/status.json and /metrics; default: the same addresses, the port after that of --bind",
    )
    add(
        "--state_file",
        metavar="FILE|none",
        help="what a restart must know; default ./lighthouse-PORT.json, none with port 0",
    )
    add(
        "--recover",
        action="store_true",
        help="without a usable state file: learn from the groups of a running job before anybody may begin one",
    )
    add(
        "--takeover_s",
        metavar="S|never",
        type=_takeover,
        default=30.0,
        help="after so long without any previous member others may go on; default 30",
    )
    add(
        "--token_file",
        metavar="FILE",
        type=Path,
        help="the job's token, else PHAROS_TOKEN: calls without it are refused",
    )
    add("--tls_cert", metavar="FILE", type=Path, help="PEM; with --tls_key: TLS")
    add("--tls_key", metavar="FILE", type=Path)
    add("--tls_ca", metavar="FILE", type=Path, help="PEM: clients must have a certificate of this authority")
    add("--insecure", action="store_true", help="without a token, listen on addresses that others can reach")
    return parser


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isascii() or not text.lstrip("-").isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number from {least} to {most}")
        return int(text)

    return whole


def _takeover(text: str) -> float | None:
    if text == "never":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MOST_MS / 1000:
        raise argparse.ArgumentTypeError(f"{text}: must be seconds above 0, or never")
    return seconds


def _token(given: argparse.Namespace) -> str:
    if given.token_file:
        return read_token(given.token_file)
    token = os.environ.get("PHAROS_TOKEN", "")
    return check_token(token, "PHAROS_TOKEN") if token else ""


def _tls(given: argparse.Namespace) -> Tls | None:
    files = {"--tls_cert": given.tls_cert, "--tls_key": given.tls_key, "--tls_ca": given.tls_ca}
    for flag, path in files.items():
        if path and not path.is_file():
            raise ValueError(f"{flag} {path}: no such file")
    if not any(files.values()):
        return None
    for flag in ("--tls_cert", "--tls_key"):
        if not files[flag]:
            raise ValueError(f"{flag} is missing: TLS needs --tls_cert and --tls_key")
    tls = Tls(given.tls_cert, given.tls_key, given.tls_ca)
    tls.server_context()
    return tls


def _state_path(asked: str | None, port: int) -> Path | None:
    if asked == "none":
        return None
    if asked is None and port == 0:
        return None  # nobody could find it again
    path = Path(asked or f"lighthouse-{port}.json")
    if not path.parent.is_dir():
        raise ValueError(f"--state_file {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--state_file {path}: the folder cannot be written")
    return path


def _http_at(asked: str | None, at: Sequence[Endpoint], access: Access) -> Sequence[Endpoint]:
    if asked == "none":
        return []
    if asked is None:
        return [Endpoint(place.host, place.port + 1 if place.port else 0) for place in at]
    found = endpoints(asked, 0, access, "--http")
    for place in found:
        try_to_listen(place, "--http")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
