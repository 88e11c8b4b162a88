"""Access to a server: token and TLS, the addresses that it listens on, and the name of this machine.

With a token every call must carry it, as `authorization: Bearer TOKEN`, in gRPC metadata and HTTP headers alike. Without one, a server
listens on loopback only, unless started with --insecure. The lighthouse may have TLS, which hides the token on the way to it; with a CA for
clients it is mutual. A group's server and healing have none.
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

from ft.children import boot_id

MIN_TOKEN = 16  # characters
_CA = "the file of the authority that issued the lighthouse's certificate (for a public one, the system's bundle)"
_WHY = {
    errno.EADDRINUSE: "the port is in use, perhaps by an earlier start of this program",
    errno.EADDRNOTAVAIL: "that is not an address of this machine",
    errno.EACCES: "this user may not listen on that port",
}


@dataclass(frozen=True)
class Tls:
    """PEM files. A server requires cert and key, and requires client certificates issued by `ca` if that is set. A client needs `ca`, the
    authority of the server's certificate, and cert and key if the server requires them."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def server_context(self) -> ssl.SSLContext:
        """Returns a server's SSL context. Raises ValueError if files are missing, or are not a certificate and its key."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load(context)
        if self.ca:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def check_client(self) -> None:
        """Raises ValueError if a client cannot use these files."""
        self._load(ssl.create_default_context(ssl.Purpose.SERVER_AUTH))

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
            if self.ca:
                context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(path) for path in (self.cert, self.key, self.ca) if path)
            raise ValueError(f"TLS with {files}: {error}") from None

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        cert, key, ca = (path.read_bytes() if path else None for path in (self.cert, self.key, self.ca))
        return cert, key, ca


@dataclass(frozen=True)
class Access:
    """Token and TLS of a server or a client. `tls`: the lighthouse's, or a client's for lighthouses whose address begins with https://."""

    token: str = ""
    insecure: bool = False  # True: without a token, listen where others can reach it
    tls: Tls | None = None

    def permits(self, metadata: Iterable[tuple[str, Any]]) -> bool:
        """True when the pairs contain the token, or no token is set. Compares in constant time."""
        for key, value in metadata if self.token else ():
            if key.lower() == "authorization":
                # HTTP headers may contain any byte: bytes that are not UTF-8 arrive as lone surrogates, and do not match
                given = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
                if hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                    return True
        return not self.token

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the pairs that a client sends with each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def find_token(file: Path | None, text: str) -> str:
    """Returns the token in the first line of `file`, else `text`, the value of PHAROS_TOKEN; may be empty. Raises ValueError."""
    token, source = text, str(file or "PHAROS_TOKEN")
    if file:
        try:
            token = file.read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"no token in {file}: {error}") from None
    if (file or text) and (len(token) < MIN_TOKEN or not re.fullmatch(r"[!-~]+", token)):
        raise ValueError(f"the token of {source} must have at least {MIN_TOKEN} printable characters without spaces")
    return token


def find_tls(ca: str, cert: str, key: str) -> Tls | None:
    """Returns the TLS of connections to a lighthouse, from the values of PHAROS_TLS_CA, PHAROS_TLS_CERT and PHAROS_TLS_KEY. Raises
    ValueError."""
    files = {"PHAROS_TLS_CA": ca, "PHAROS_TLS_CERT": cert, "PHAROS_TLS_KEY": key}
    if not any(files.values()):
        return None
    for name, needs in (("PHAROS_TLS_CERT", "PHAROS_TLS_KEY"), ("PHAROS_TLS_KEY", "PHAROS_TLS_CERT")):
        if files[name] and not files[needs]:
            raise ValueError(
                f"{name} = {files[name]}: requires {needs}, too: the certificate that groups show, and its key"
            )
    if not ca:
        raise ValueError(f"PHAROS_TLS_CERT = {cert}: requires PHAROS_TLS_CA, too: {_CA}")
    for name, file in files.items():
        if file and not Path(file).is_file():
            raise ValueError(f"{name} = {file}: no such file")
    tls = Tls(*(Path(file) if file else None for file in (cert, key, ca)))
    tls.check_client()
    return tls


def check_scheme(lighthouse: str, tls: Tls | None) -> None:
    """Raises ValueError unless the lighthouse's address is https:// with TLS, and http:// without."""
    https = lighthouse.startswith("https://")
    if https and not tls:
        raise ValueError(f"TORCHFT_LIGHTHOUSE = {lighthouse}: requires PHAROS_TLS_CA: {_CA}")
    if tls and not https:
        nearest = "https://" + lighthouse.removeprefix("http://")
        raise ValueError(
            f"TORCHFT_LIGHTHOUSE = {lighthouse}: PHAROS_TLS_CA is set, which is for https://; nearest: {nearest}"
        )


@dataclass(frozen=True)
class Endpoint:
    """A host, as a name or an address, and a port."""

    host: str  # without brackets
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str, what: str) -> Endpoint:
        """Reads "host:port", "[v6]:port" or "http://host:port". Raises ValueError that names the setting `what`."""
        found = re.fullmatch(r"(?:https?://)?(?:\[([\w:.%]+)\]|([^\s:\[\]/]+)):(\d{1,5})/?", text)
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
    """Returns the addresses to listen on: `bind`, else all with a token or --insecure, else loopback. Raises ValueError if unsafe."""
    if bind is None:
        hosts = [all_interfaces()] if access.token or access.insecure else ["127.0.0.1", "::1"]
        return [Endpoint(host, port) for host in hosts if host != "::1" or has_ipv6()]
    asked = Endpoint.parse(bind, what)
    if not (asked.loopback or access.token or access.insecure):
        nearest = f"{what} 127.0.0.1:{asked.port}, or --token_file FILE, or --insecure"
        raise ValueError(f"{what} {bind}: others could reach it, and there is no token; nearest: {nearest}")
    return [asked]


def all_interfaces() -> str:
    return "::" if has_ipv6() else "0.0.0.0"


def has_ipv6() -> bool:  # True: ::1 can be bound
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


def this_host(proc: Path = Path("/proc")) -> str:
    """Returns the host name with the pid namespace and the ID of the kernel's boot. A container may have the host's name, but its process
    IDs (pids) differ. Two machines may have one name, and the number of the first namespace is the same on all."""
    namespace = ""
    with suppress(OSError):
        namespace = str((proc / "self/ns/pid").readlink())
    return f"{socket.gethostname()} {namespace} {boot_id(proc)}"


def try_to_listen(endpoint: Endpoint, what: str = "--bind") -> None:
    """Raises ValueError with the cause if no process can listen there: the error of grpc itself has no cause."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
    except (socket.gaierror, UnicodeError):  # UnicodeError: not a valid host name
        raise ValueError(f"{what} {endpoint}: there is no host {endpoint.host}") from None
    except OSError as error:
        why = _WHY.get(error.errno or 0, os.strerror(error.errno or 0).lower())
        raise ValueError(f"{what} {endpoint}: {why}") from None
