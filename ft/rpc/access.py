"""Access to a server: its token and TLS, the addresses that it listens on, and the name of this machine.

With a token every call must carry it, as `authorization: Bearer TOKEN`, in gRPC metadata and in HTTP headers alike. Without one, a server
listens on loopback only, unless its operator says --insecure. TLS hides the token from the network; with a CA for clients, it is mutual.
"""

from __future__ import annotations

import errno
import hmac
import os
import re
import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

MIN_TOKEN = 16  # characters
_WHY = {
    errno.EADDRINUSE: "the port is in use; another lighthouse may be running there",
    errno.EADDRNOTAVAIL: "that is no address of this machine",
    errno.EACCES: "this user may not listen on that port",
}


@dataclass(frozen=True)
class Tls:
    """PEM files. A server needs cert and key, and asks clients for certificates of `ca` if there is one. A client needs `ca` for a server
    that no public authority vouches for, and cert and key where it is asked for them."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def server_context(self) -> ssl.SSLContext:
        """Raises ValueError where files are missing, or are no certificate and its key."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            assert self.cert and self.key
            context.load_cert_chain(self.cert, self.key)
            if self.ca:
                context.load_verify_locations(self.ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(path) for path in (self.cert, self.key, self.ca) if path)
            raise ValueError(f"TLS with {files}: {error}") from None
        return context

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        cert, key, ca = (path.read_bytes() if path else None for path in (self.cert, self.key, self.ca))
        return cert, key, ca


@dataclass(frozen=True)
class Access:
    token: str = ""
    insecure: bool = False  # without a token, serve whoever reaches us
    tls: Tls | None = None

    def permits(self, metadata: Iterable[tuple[str, Any]]) -> bool:
        """True when the pairs hold the token; compares in constant time."""
        for key, value in metadata if self.token else ():
            if key.lower() == "authorization":
                # HTTP headers may hold any byte: what is no UTF-8 arrives as lone surrogates, and is simply wrong
                given = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
                if hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                    return True
        return not self.token

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Pairs for a client to send with each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def find_token(file: Path | None, text: str) -> str:
    """The token in the first line of the file, if one is named, else `text` of PHAROS_TOKEN; may be empty. Raises ValueError."""
    if not file:
        return check_token(text, "PHAROS_TOKEN") if text else ""
    try:
        token = file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"no token in {file}: {error}") from None
    return check_token(token, str(file))


def check_token(token: str, source: str) -> str:
    if len(token) < MIN_TOKEN or not re.fullmatch(r"[!-~]+", token):
        raise ValueError(f"the token of {source} must have at least {MIN_TOKEN} printable characters without spaces")
    return token


@dataclass(frozen=True)
class Endpoint:
    host: str  # without brackets
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str, what: str) -> Endpoint:
        """Reads "host:port", "[v6]:port" or "http://host:port". Raises ValueError, which names `what`."""
        found = re.fullmatch(r"(?:https?://)?(?:\[([0-9a-fA-F:.%\w]+)\]|([^\s:\[\]/]+)):(\d{1,5})/?", text)
        if not found or int(found[3]) > 65535:
            raise ValueError(f"{what} {text}: must be HOST:PORT, such as 0.0.0.0:29510 or [::]:29510")
        return Endpoint(found[1] or found[2], int(found[3]))

    @property
    def loopback(self) -> bool:
        with suppress(ValueError):
            return ip_address(self.host.partition("%")[0]).is_loopback
        return self.host == "localhost"

    @property
    def wildcard(self) -> bool:
        return self.host in ("::", "0.0.0.0")


def endpoints(bind: str | None, port: int, access: Access, what: str = "--bind") -> list[Endpoint]:
    """Addresses to listen on: `bind`; else all of them with a token or --insecure, loopback without. Raises ValueError for an open one."""
    if bind is None:
        hosts = ["::"] if access.token or access.insecure else ["127.0.0.1", "::1"]
        return [Endpoint(host, port) for host in hosts if host != "::1" or has_ipv6()]
    asked = Endpoint.parse(bind, what)
    if not (asked.loopback or access.token or access.insecure):
        nearest = f"{what} 127.0.0.1:{asked.port}, or --token_file FILE, or --insecure"
        raise ValueError(f"{what} {bind}: others could reach it, and there is no token; nearest: {nearest}")
    return [asked]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


def this_host() -> str:
    """Names this machine and the process numbers that are valid in it: a container may share the name, but not the numbers."""
    space = ""
    with suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return f"{socket.gethostname()} {space}"


def try_to_listen(endpoint: Endpoint, what: str = "--bind") -> None:
    """Raises ValueError, with the cause in words, where nobody could listen there: grpc itself says no more than that it failed."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
    except (socket.gaierror, UnicodeError):  # the latter for what cannot be a name
        raise ValueError(f"{what} {endpoint}: there is no host {endpoint.host}") from None
    except OSError as error:
        why = _WHY.get(error.errno or 0, os.strerror(error.errno or 0).lower())
        raise ValueError(f"{what} {endpoint}: {why}") from None
