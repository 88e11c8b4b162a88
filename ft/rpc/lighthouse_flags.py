"""The flags of the lighthouse, checked before anything is installed, loaded or bound. Standard library only.

run_lighthouse.sh first runs only this module: exit code 0, or 2 and one line that names the legal values.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":  # run by path, from any folder: `-m` would take the `ft` of the working folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from ft.protocol.lighthouse import LighthouseConfig
from ft.protocol.messages import Timeouts
from ft.rpc import state_file
from ft.rpc.access import Access, Endpoint, Tls, endpoints, find_token, try_to_listen

DEFAULT_PORT = 29510
RUNS = Path("outputs")  # job.dump_folder's default
MAX_MS = 24 * 3600 * 1000
# run_lighthouse.sh prints the same lines
USAGE = """\
usage: run_lighthouse.sh --min_replicas N [flags]

Forms the quorums of a job of replica groups. A number after the last semicolon is a default.

  --min_replicas N           required: the fewest groups of a quorum, healing ones included
  --bind HOST:PORT           default [::]:29510 with a token or --insecure, else loopback; port 0: a free one
  --join_timeout_ms MS       how long the oldest request of a previous member (else of any group) waits for live groups; 60000
  --quorum_tick_ms MS        interval of the checks of timeouts, at most 5000; 100
  --heartbeat_timeout_ms MS  silence after which a group is lost; must equal the groups' fault_tolerance.heartbeat_timeout_s; 5000
  --heal_grace_s S           wait of the others for a state that is arriving; must equal the groups' fault_tolerance.heal_grace_s; 30
  --http HOST:PORT|none      address of the dashboard, /status.json and /metrics; default: host and next port of --bind
  --state_file FILE|none     state for a restart; default: outputs/lighthouse-PORT.json of the current folder, none with port 0
  --recover                  where there is no usable state file: learn the job's state from its running groups
  --takeover_s S|never       silence of all members of the last quorum after which other groups may continue; 30
  --stall_s S                longest wait for a group, then it is lost; 10 s if most members wait; never below five median steps; 60
  --num_replica_groups N     intended number of groups, for information, 0: unknown; 0
  --lower_limits             let --min_replicas, --takeover_s and --num_replica_groups be lower than the state file's
  --token_file FILE          file with the job's token (else PHAROS_TOKEN); calls without the token are refused
  --tls_cert FILE --tls_key FILE --tls_ca FILE   PEM; with --tls_ca clients need a certificate of that authority
  --insecure                 without a token, listen where others can reach it
"""


@dataclass(frozen=True)
class LighthouseOptions:
    """The options of a lighthouse."""

    config: LighthouseConfig
    at: Sequence[Endpoint]  # addresses of gRPC
    access: Access = field(default_factory=Access)
    state: Path | None = None  # state file
    lower_limits: bool = False  # True: the config's limits apply even where the state file's are higher
    recover: bool = False  # True: learn the state of the job from its running groups
    http: Sequence[Endpoint] = ()  # addresses of the dashboard; empty: no dashboard
    http_asked: bool = False  # True: --http is given, so a used port is an error; False: then there is no dashboard


def main(argv: Sequence[str]) -> int:
    try:
        read_options(argv)
        return 0
    except ValueError as error:
        return complain(error)


def complain(error: ValueError) -> int:
    """Prints the error as one line, even if an argument contains line breaks. Returns the exit code."""
    print("lighthouse:", " ".join(str(error).split()), file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        return USAGE

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def read_options(
    argv: Sequence[str],
    *,
    try_to_listen: Callable[[Endpoint, str], None] = try_to_listen,
    try_to_write: Callable[[Path], None] = state_file.try_to_write,
) -> LighthouseOptions:
    """Returns the checked options. Raises ValueError with one line that names the legal values."""
    given = parser().parse_args(argv)
    if given.min_replicas is None:
        raise ValueError("--min_replicas is missing: the fewest groups that train, 1 or more")
    token = find_token(given.token_file, os.environ.get("PHAROS_TOKEN", ""))
    access = Access(token, given.insecure, _tls(given))
    at = endpoints(given.bind, DEFAULT_PORT, access)
    for place in at:
        try_to_listen(place, "--bind")
    silent_s, grace_s = given.heartbeat_timeout_ms / 1000, given.heal_grace_s
    if silent_s >= grace_s:  # no Pharos group could join: its rendezvous_s lies between the two
        legal = f"must be below --heal_grace_s, {grace_s:g} s, so that a group's rendezvous_s lies between the two"
        raise ValueError(f"--heartbeat_timeout_ms {given.heartbeat_timeout_ms}: {legal}")
    if given.takeover_s is not None and given.takeover_s < grace_s:
        raise ValueError(f"--takeover_s {given.takeover_s:g}: must be at least --heal_grace_s, {grace_s:g}, or never")
    times = Timeouts(
        heartbeat_timeout_s=silent_s, heal_grace_s=grace_s, takeover_s=given.takeover_s, stall_s=given.stall_s
    )
    config = LighthouseConfig(
        min_replicas=given.min_replicas,
        join_timeout_s=given.join_timeout_ms / 1000,
        tick_s=given.quorum_tick_ms / 1000,
        times=times,
        num_replica_groups=given.num_replica_groups,
    )
    http = [] if given.http == "none" else _http_at(given.http, at, access)
    for place in http if given.http else ():
        try_to_listen(place, "--http")
    state = _state_path(given.state_file, at[0].port, given.recover, try_to_write)  # last: it may create the folder
    return LighthouseOptions(config, at, access, state, given.lower_limits, given.recover, http, given.http is not None)


def parser() -> argparse.ArgumentParser:
    made = _Parser(prog="run_lighthouse.sh", allow_abbrev=False)
    add = made.add_argument
    add("--min_replicas", type=_whole(1, 1 << 20))
    add("--bind")
    add("--join_timeout_ms", type=_whole(0, MAX_MS), default=60_000)
    add("--quorum_tick_ms", type=_whole(1, 5000), default=100)  # the dashboard is updated with it
    add("--heartbeat_timeout_ms", type=_whole(1, MAX_MS), default=5000)
    add("--heal_grace_s", type=_seconds, default=30.0)
    add("--http")
    add("--state_file")
    add("--recover", action="store_true")
    add("--takeover_s", type=lambda text: None if text == "never" else _seconds(text, ", or never"), default=30.0)
    add("--stall_s", type=_seconds, default=60.0)
    add("--num_replica_groups", type=_whole(0, 1 << 20), default=0)
    add("--lower_limits", "--lower_terms", action="store_true")  # the second: its former name
    for name in ("--token_file", "--tls_cert", "--tls_key", "--tls_ca"):
        add(name, type=Path)
    add("--insecure", action="store_true")
    return made


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isascii() or not text.removeprefix("-").isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number from {least} to {most}")
        return int(text)

    return whole


def _seconds(text: str, else_: str = "") -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_MS / 1000:
        raise argparse.ArgumentTypeError(f"{text}: must be seconds above 0, up to {MAX_MS // 1000}{else_}")
    return seconds


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


def _state_path(asked: str | None, port: int, recover: bool, write: Callable[[Path], None]) -> Path | None:
    if asked == "none" or (asked is None and port == 0):  # a restart gets a different free port, and could not find it
        return None
    path = Path(asked or f"lighthouse-{port}.json")
    if not asked and not path.exists():  # earlier versions wrote it to the working folder
        with suppress(OSError):  # reported below: there is no folder
            RUNS.mkdir(exist_ok=True)
        path = RUNS / path
    if not path.parent.is_dir():
        raise ValueError(f"--state_file {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"--state_file {path}: is a folder")
    try:
        write(path)
    except OSError as error:
        if error.errno not in state_file.PASSING:  # on those the lighthouse starts, and waits for the disk
            raise ValueError(f"--state_file {path}: the folder cannot be written: {error.strerror}") from None
    if not recover:
        state_file.read_or_refuse(path)
    return path


def _http_at(asked: str | None, at: Sequence[Endpoint], access: Access) -> Sequence[Endpoint]:
    if asked is None:
        if at[0].port == 65535:
            raise ValueError("--bind has port 65535, and the dashboard takes the next: set --http HOST:PORT or none")
        return [Endpoint(place.host, place.port + 1 if place.port else 0) for place in at]
    found = endpoints(asked, 0, access, "--http")
    for place in found:
        if place.port and place.port == at[0].port:
            raise ValueError(f"--http {asked}: is the port of --bind; nearest: {Endpoint(place.host, place.port + 1)}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
