"""The address at which other replica groups reach this host: a numeric one, never a name that needs to be resolved.

Flow: start.py (or compat/manager.py) calls `advertised` once; the group server, the rendezvous store, the heal server and the Prober listen
at the result and advertise it. gloo takes the interface that leads to the store (gloo.form_gloo), NCCL chooses its own.
"""

from __future__ import annotations

import ctypes
import difflib
import ipaddress
import logging
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_uint, c_void_p
from functools import partial

from ft.process_groups.sockets import local_address_for
from ft.rpc.access import Endpoint

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
SETTING = "fault_tolerance.interface"
AGAIN_S = 1.0  # between two look-ups of a name that has no address yet
_IFF_UP = 1
log = logging.getLogger("pharos.manager")


class _IfAddrs(ctypes.Structure):
    """The struct ifaddrs of getifaddrs(3), which Python does not have; its first fields are the same on Linux and macOS."""

    _fields_ = (("next", c_void_p), ("name", c_char_p), ("flags", c_uint), ("addr", c_void_p))


def _address(sockaddr: int) -> Address | None:
    """Reads a struct sockaddr; None: it is neither IPv4 nor IPv6."""
    head = ctypes.string_at(sockaddr, 2)
    # on BSD the first byte is the struct's length
    family = int.from_bytes(head, sys.byteorder) if sys.platform == "linux" else head[1]
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(ctypes.string_at(sockaddr + 4, 4))
    if family == socket.AF_INET6:
        return ipaddress.IPv6Address(ctypes.string_at(sockaddr + 8, 16))
    return None


def interfaces() -> dict[str, list[Address]]:
    """Returns this machine's addresses by interface, except for interfaces that are down and link-local IPv6 ones, which need a scope."""
    there: dict[str, list[Address]] = {name: [] for _, name in socket.if_nameindex()}
    libc = ctypes.CDLL(None, use_errno=True)
    head = c_void_p()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    try:
        entry = head.value
        while entry:
            one = _IfAddrs.from_address(entry)
            address = _address(one.addr) if one.addr and one.flags & _IFF_UP else None
            if address is not None and not (address.version == 6 and address.is_link_local):
                there.setdefault(one.name.decode(), []).append(address)
            entry = one.next
    finally:
        libc.freeifaddrs(head)
    return there


def address_of(
    host: str,
    what: str,
    resolve: Callable[[str], str],
    patience_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Returns `resolve(host)`, an address. Raises ConnectionError, which begins with `what`, if the name has none within `patience_s`: the
    name server may be away, or not know it yet; ValueError for what cannot be a name."""
    until_s, warned = clock() + patience_s, False
    while True:
        try:
            return resolve(host).partition("%")[0]
        except UnicodeError:
            raise ValueError(f"{what}: there is no host {host}") from None
        except socket.gaierror as error:
            why = error.strerror
        if clock() >= until_s:
            raise ConnectionError(f"{what}: {host} has no address within {patience_s:g} s: {why}")
        if not warned:
            warned = True
            log.warning("%s: %s has no address; waiting %g s for one: %s", what, host, patience_s, why)
        pause(min(AGAIN_S, patience_s))


def advertised(
    interface: str,
    lighthouse: str,
    interfaces: Callable[[], Mapping[str, Sequence[Address]]] = interfaces,
    *,
    patience_s: float = 0.0,
    resolve: Callable[[str], str] = local_address_for,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Returns the address to advertise. `interface`: the name of an interface ("eth0"), a network ("10.0.0.0/8"), one address, or "" for
    the source address of connections to `lighthouse` ("http://host:port"; no packet is sent). Of several addresses it prefers those that
    are not loopback, then those of the address family of the lighthouse (IPv4 if that is a name). Raises ValueError, with the choices;
    ConnectionError if the lighthouse's name has no address within `patience_s`: the name server may be away, or not know it yet."""
    place = Endpoint.parse(lighthouse, "TORCHFT_LIGHTHOUSE")
    if not interface:
        what = f"TORCHFT_LIGHTHOUSE {place}"
        try:
            return address_of(place.host, what, resolve, patience_s, clock=clock, pause=pause)
        except ConnectionError:
            raise
        except OSError:
            raise ValueError(f"{what}: no interface of this machine leads there; {_words(interfaces())}") from None
    there = interfaces()
    try:
        network = ipaddress.ip_network(interface, strict=False)
    except ValueError:
        if "/" in interface:
            raise ValueError(
                f'{SETTING} = "{interface}": must be an interface, or a network such as 10.0.0.0/8 or fd00::/8; {_words(there)}'
            ) from None
        found = there.get(interface, ())
        why = "it has no address, or is down" if interface in there else "there is no such interface"
        close = difflib.get_close_matches(interface, [name for name, some in there.items() if some], n=1, cutoff=0.4)
    else:
        addresses = [address for some in there.values() for address in some]
        found = [address for address in addresses if address in network]
        why = "no address of this machine is in it"
        close = [str(max(addresses, key=partial(_closeness, network)))] if addresses else []
    if not found:
        nearest = f'; nearest: "{close[0]}"' if close else ""
        raise ValueError(f'{SETTING} = "{interface}": {why}; {_words(there)}{nearest}')
    version = 6 if ":" in place.host else 4
    return str(min(found, key=lambda address: (address.is_loopback, address.version != version)))


def _closeness(network: Network, address: Address) -> tuple[bool, int]:
    """Sort key of addresses, by nearness to a network: not loopback, then the number of common leading bits; -1: a different family."""
    bits = address.max_prefixlen - (int(address) ^ int(network.network_address)).bit_length()
    return not address.is_loopback, bits if address.version == network.version else -1


def _words(there: Mapping[str, Sequence[Address]]) -> str:
    return "there are " + ", ".join(f"{name} ({', '.join(map(str, some))})" for name, some in there.items() if some)
