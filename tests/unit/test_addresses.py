"""The address that a machine advertises: with the interfaces of this machine, and with given ones."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import pytest

from ft.addresses import Address, advertised, interfaces
from ft.process_groups.store import without_dns
from ft.rpc.access import has_ipv6

ELSEWHERE = "http://192.0.2.77:29510"  # a number: never resolved, and nothing is sent to it
OTHER_MACHINE = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.1.2.3", "fd00::7"], "ib0": ["192.168.7.9"], "usb0": []}
needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def other_machine() -> dict[str, list[Address]]:
    return {name: [ip_address(text) for text in some] for name, some in OTHER_MACHINE.items()}


# ------------------------------------------------------------------------------------------------ this machine


def test_every_address_that_is_found_can_be_listened_on():
    found = [address for some in interfaces().values() for address in some]
    assert ip_address("127.0.0.1") in found
    for address in found:
        with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6) as listener:
            listener.bind((str(address), 0))


def test_the_names_are_those_of_the_kernel():
    assert set(interfaces()) == {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize("lighthouse", ["http://127.0.0.1:29510", "http://localhost:29510", "127.0.0.1:1"])
def test_a_lighthouse_on_this_machine_is_reached_by_loopback(lighthouse: str):
    assert ip_address(advertised("", lighthouse)).is_loopback


def test_the_address_is_the_one_that_a_packet_to_the_lighthouse_would_carry():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        host = advertised("", f"http://127.0.0.1:{listener.getsockname()[1]}")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"hello", listener.getsockname())
            data, (source, _) = listener.recvfrom(16)
        assert (data, source) == (b"hello", host)  # the first packet is the test's own: asking sent none


@needs_ipv6
def test_ipv6_without_brackets():
    assert advertised("", "http://[::1]:29510") == "::1"
    assert advertised("::1/128", ELSEWHERE) == "::1"


def test_a_name_and_a_network_mean_the_same_address():
    name = next(name for name, some in interfaces().items() if ip_address("127.0.0.1") in some)
    assert advertised(name, "http://127.0.0.1:1") == advertised("127.0.0.0/8", ELSEWHERE) == "127.0.0.1"


def test_nothing_is_resolved_where_the_interface_is_named():
    assert advertised("127.0.0.1", "http://no.such.host.invalid:29510") == "127.0.0.1"


# ------------------------------------------------------------------------------------------------ others


@pytest.mark.parametrize(
    ("interface", "lighthouse", "expected"),
    [
        ("eth0", ELSEWHERE, "10.1.2.3"),
        ("eth0", "http://[fd00::1]:29510", "fd00::7"),  # of the lighthouse's own family
        ("eth0", "http://head.cluster:29510", "10.1.2.3"),
        ("ib0", "http://[fd00::1]:29510", "192.168.7.9"),  # it has no other
        ("192.168.0.0/16", ELSEWHERE, "192.168.7.9"),
        ("10.1.2.200/24", ELSEWHERE, "10.1.2.3"),  # an address of the network stands for it
        ("fd00::/8", ELSEWHERE, "fd00::7"),
        ("0.0.0.0/0", ELSEWHERE, "10.1.2.3"),  # loopback last
    ],
)
def test_names_and_networks(interface: str, lighthouse: str, expected: str):
    assert advertised(interface, lighthouse, other_machine) == expected


THERE = r"there are lo \(127\.0\.0\.1, ::1\), eth0 \(10\.1\.2\.3, fd00::7\), ib0 \(192\.168\.7\.9\)"


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ("eht0", rf'^fault_tolerance\.interface = "eht0": there is no such interface; {THERE}; nearest: "eth0"$'),
        ("usb0", rf'"usb0": it has no address, or is down; {THERE}'),
        ("192.168.8.0/24", rf'"192\.168\.8\.0/24": no address of this machine is in it; {THERE}; nearest: "192\.168\.7\.9"$'),
        ("fe00::/16", r'nearest: "fd00::7"$'),
        ("172.16.0.0/12", r'nearest: "192\.168\.7\.9"$'),  # whatever it is, not loopback
        ("10.0.0.0/33", rf'"10\.0\.0\.0/33": must be an interface, or a network such as 10\.0\.0\.0/8 or fd00::/8; {THERE}$'),
    ],
)  # fmt: skip
def test_errors_name_the_setting_what_there_is_and_the_nearest(interface: str, message: str):
    with pytest.raises(ValueError, match=message):
        advertised(interface, ELSEWHERE, other_machine)


def test_a_lighthouse_that_no_route_leads_to():
    """A broadcast address is unreachable, as the socket lacks SO_BROADCAST."""
    with pytest.raises(
        ValueError, match=r"^TORCHFT_LIGHTHOUSE 255\.255\.255\.255:29510: no interface .* leads there; there are "
    ):
        advertised("", "http://255.255.255.255:29510")


def test_a_lighthouse_without_an_address():
    with (
        without_dns(),
        pytest.raises(
            ConnectionError,
            match=r"^TORCHFT_LIGHTHOUSE head\.cluster:29510: head\.cluster has no address within 0 s: \w",
        ),
    ):
        advertised("", "http://head.cluster:29510")
    name = f"{'a' * 64}.cluster"  # no name can be so long
    with pytest.raises(ValueError, match=rf"^TORCHFT_LIGHTHOUSE {name}:29510: there is no host {name}$"):
        advertised("", f"http://{name}:29510", patience_s=60.0)
    with pytest.raises(ValueError, match="TORCHFT_LIGHTHOUSE nonsense: must be HOST:PORT"):
        advertised("", "nonsense")


def test_a_name_that_has_no_address_yet_is_waited_for(caplog: pytest.LogCaptureFixture):
    """The name server may be down for a moment, or the name not be registered yet."""
    away = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    said = "TORCHFT_LIGHTHOUSE head.cluster:29510: head.cluster has no address"

    def told(answers: list[str | OSError], times: list[float]) -> tuple[str, list[float]]:
        pauses = list[float]()

        def resolve(host: str) -> str:
            if isinstance(answer := answers.pop(0), OSError):
                raise answer
            return answer

        given = dict(resolve=resolve, clock=iter(times).__next__, pause=pauses.append)
        try:
            return advertised("", "http://head.cluster:29510", patience_s=60.0, **given), pauses  # type: ignore[arg-type]
        except ConnectionError as error:
            return str(error), pauses

    assert told([away, away, "fe80::7%eth0"], [0.0, 5.0, 11.0]) == ("fe80::7", [1.0, 1.0])
    warning = f"{said}; waiting 60 s for one: Temporary failure in name resolution"
    assert caplog.messages == [warning]  # once
    too_late = f"{said} within 60 s: Temporary failure in name resolution"
    assert told([away, away], [0.0, 5.0, 60.0]) == (too_late, [1.0])
