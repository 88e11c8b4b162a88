"""The flags of the lighthouse, checked before anything is installed, loaded or bound. Needs nothing but Python itself.

run_lighthouse.sh runs this module alone before it installs anything: exit code 0, or 2 and one line that says what is legal.
lighthouse_main.py reads its options here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ft.protocol.lighthouse import LighthouseConfig
from ft.protocol.messages import Times
from ft.rpc import state_file
from ft.rpc.access import Access, Endpoint, Tls, check_token, endpoints, read_token, try_to_listen

DEFAULT_PORT = 29510
RUNS = Path("outputs")  # job.dump_folder's default
MOST_MS = 24 * 3600 * 1000


@dataclass(frozen=True)
class Options:
    config: LighthouseConfig
    at: Sequence[Endpoint]
    access: Access
    state: Path | None
    lower_terms: bool
    recover: bool  # whether the groups of a running job are asked for what the state file would have said
    http: Sequence[Endpoint]  # empty: none
    http_asked: bool  # else a taken port is no reason not to start


def main(argv: Sequence[str]) -> int:
    try:
        read_options(argv)
    except ValueError as error:
        return complain(error)
    return 0


def complain(error: ValueError) -> int:
    """One line, whatever was typed."""
    print("lighthouse:", " ".join(str(error).split()), file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def read_options(argv: Sequence[str]) -> Options:
    """Raises ValueError: one line that says what is legal."""
    given = parser().parse_args(argv)
    if given.min_replicas is None:
        raise ValueError("--min_replicas is missing: the fewest groups that train, 1 or more")
    access = Access(_token(given), given.insecure, _tls(given))
    bind = Endpoint.parse(given.bind, "--bind") if given.bind else None
    at = endpoints(given.bind, bind.port if bind else DEFAULT_PORT, access)
    for place in at:
        try_to_listen(place)
    times = Times(
        heartbeat_timeout_s=given.heartbeat_timeout_ms / 1000, takeover_s=given.takeover_s, stall_s=given.stall_s
    )
    config = LighthouseConfig(
        min_replicas=given.min_replicas,
        join_timeout_s=given.join_timeout_ms / 1000,
        tick_s=given.quorum_tick_ms / 1000,
        times=times,
        num_replica_groups=given.num_replica_groups,
    )
    http = _http_at(given.http, at, access)
    state = _state_path(given.state_file, at[0].port, given.recover)  # last, for it may make the folder
    return Options(config, at, access, state, given.lower_terms, given.recover, http, given.http is not None)


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="run_lighthouse.sh", description="Tells groups that train together who takes part.", allow_abbrev=False
    )
    add = made.add_argument
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
        help="the live page, /status.json and /metrics; default: the same addresses, the port after that of --bind",
    )
    add(
        "--state_file",
        metavar="FILE|none",
        help="what a restart must know; default outputs/lighthouse-PORT.json, none with port 0",
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
        "--stall_s",
        metavar="S",
        type=_seconds,
        default=60.0,
        help="a group that keeps any other waiting for so long is lost, one that keeps most waiting sooner; default 60",
    )
    add(
        "--num_replica_groups",
        metavar="N",
        type=_whole(0, 1 << 20),
        default=0,
        help="that the job is meant to have, for people; more may come; default 0: not said",
    )
    add(
        "--lower_terms",
        action="store_true",
        help="let --min_replicas, --takeover_s and --num_replica_groups be lower than the state file's; else its own stay",
    )
    add(
        "--token_file",
        metavar="FILE",
        type=Path,
        help="the job's token, else PHAROS_TOKEN: calls without it are refused",
    )
    add("--tls_cert", metavar="FILE", type=Path, help="PEM; with --tls_key: TLS")
    add("--tls_key", metavar="FILE", type=Path, help="PEM: of that certificate")
    add("--tls_ca", metavar="FILE", type=Path, help="PEM: clients must have a certificate of this authority")
    add("--insecure", action="store_true", help="without a token, listen on addresses that others can reach")
    return made


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isascii() or not text.lstrip("-").isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number from {least} to {most}")
        return int(text)

    return whole


def _takeover(text: str) -> float | None:
    if text == "never":
        return None
    return _seconds(text, ", or never")


def _seconds(text: str, else_: str = "") -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MOST_MS / 1000:
        raise argparse.ArgumentTypeError(f"{text}: must be seconds above 0{else_}")
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


def _state_path(asked: str | None, port: int, recover: bool) -> Path | None:
    if asked == "none":
        return None
    if asked is None and port == 0:
        return None  # nobody could find it again
    path = Path(asked) if asked else _usual_state_path(port)
    if not path.parent.is_dir():
        raise ValueError(f"--state_file {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"--state_file {path}: is a folder")
    try:
        state_file.try_to_write(path)
    except OSError as error:
        if error.errno not in state_file.PASSING:  # it starts all the same, and waits for the disk
            raise ValueError(f"--state_file {path}: the folder cannot be written: {error.strerror}") from None
    if not recover:
        state_file.read_or_refuse(path)
    return path


def _usual_state_path(port: int) -> Path:
    """Returns the state file's default place: among the runs; the working folder where an older one is there, not to be forgotten."""
    before = Path(f"lighthouse-{port}.json")
    if before.exists():
        return before
    with suppress(OSError):  # told when it is tried
        RUNS.mkdir(exist_ok=True)
    return RUNS / before


def _http_at(asked: str | None, at: Sequence[Endpoint], access: Access) -> Sequence[Endpoint]:
    if asked == "none":
        return []
    if asked is None:
        if at[0].port == 65535:
            raise ValueError("--bind has the last port, and the page takes the next one: say --http HOST:PORT or none")
        return [Endpoint(place.host, place.port + 1 if place.port else 0) for place in at]
    found = endpoints(asked, 0, access, "--http")
    for place in found:
        if place.port and place.port == at[0].port:
            raise ValueError(f"--http {asked}: is the port of --bind; nearest: {Endpoint(place.host, place.port + 1)}")
        try_to_listen(place, "--http")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
