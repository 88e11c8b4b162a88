"""The rendezvous store: our client against torch's server, and waits that it must be able to interrupt."""

from __future__ import annotations

import ctypes
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ft.process_groups.store import StoreClient, parse, serve, sweep, without_dns
from tests.waiting import in_time

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def server() -> TCPStore:
    return serve()


def client(server: TCPStore, prefix: str, limit_s: float = LIMIT_S) -> StoreClient:
    made = StoreClient(f"127.0.0.1:{server.port}/{prefix}", limit_s)
    made.connect()
    return made


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1:29500/job/7/0", ("10.0.0.1", 29500, "job/7/0")),
        ("[fe80::1%eth0]:80/a", ("fe80::1%eth0", 80, "a")),
        ("node-3.example.org:1", ("node-3.example.org", 1, "")),
    ],
)
def test_a_store_address(address: str, parts: tuple[str, int, str]):
    assert parse(address) == parts


def test_it_says_and_hears_what_torchs_client_does(server: TCPStore):
    ours, theirs = client(server, "a/b"), PrefixStore("a/b", server)
    ours.set("text", "words")
    theirs.set("bytes", bytes(range(256)))
    assert theirs.get("text") == b"words" and ours.get("bytes") == bytes(range(256))
    ours.set("empty", "")
    assert ours.get("empty") == theirs.get("empty") == b""
    assert ours.multi_get(["bytes", "empty", "text"]) == [bytes(range(256)), b"", b"words"]

    assert ours.compare_set("claim", "", "mine") == b"mine" == theirs.get("claim")
    assert ours.compare_set("claim", "", "yours") == b"mine"
    assert ours.compare_set("claim", b"mine", b"yours") == b"yours"
    assert ours.add("count", 5) == 5 and theirs.add("count", -7) == -2 and ours.add("count", 0) == -2

    assert ours.check(["text", "empty"]) and not ours.check(["text", "absent"])
    before = server.num_keys()
    assert ours.delete_key("text") and not ours.delete_key("text")
    assert server.num_keys() == before - 1 and not theirs.check(["text"])
    big = bytes(5_000_000)
    ours.set("big", big)
    assert theirs.get("big") == big == ours.get("big")
    ours.close()


def test_prefixes_keep_apart(server: TCPStore):
    one, other = client(server, "one"), client(server, "other")
    one.set("key", "1")
    assert not other.check(["key"]) and server.get("one/key") == b"1"
    one.close()
    other.close()


def test_the_keys_of_past_generations_go():
    """24 members, 100 generations, with the keys of members and of gloo; one generation never formed, one member is late."""
    store = serve()
    members = [client(store, "") for _ in range(24)]
    most = 0
    for quorum_id in range(1, 101):
        for rank, member in enumerate(members):
            member.set(f"epoch/{quorum_id}/0/here/{rank}", "said")
            if quorum_id != 50:
                member.set(f"epoch/{quorum_id}/0/0/{rank}", "address" * 20)
            assert member.check([f"epoch/{quorum_id}/0/here/{rank}"])  # a `set` has no answer
        sweep(store, quorum_id)
        most = max(most, store.num_keys())
        members[7].set(f"epoch/{quorum_id - 1}/0/0/7", "late")
    assert most == 48
    members[0].set("another/use", "of the same store")
    assert members[0].check(["another/use"])
    sweep(store, 101)
    assert store.list_keys() == ["another/use"]
    for member in members:
        member.close()


def test_a_key_is_waited_for(server: TCPStore):
    waiting, writing, got = client(server, "wait"), client(server, "wait"), []
    thread = threading.Thread(target=lambda: got.append(waiting.get("late")))
    thread.start()
    writing.set("late", "here")
    thread.join(LIMIT_S)
    assert got == [b"here"]
    with pytest.raises(TimeoutError, match=r"no never within 0.05 s"):
        waiting.wait(["never"], timedelta(seconds=0.05))
    assert waiting.get("late") == b"here"  # and it is of use as before
    waiting.close()
    writing.close()


def woken(store: StoreClient, wait: Callable[[], object], under_way: Callable[[], bool]) -> str:
    """Hangs up while another thread waits. Returns the message of the error in that thread."""
    told: list[str] = []

    def run() -> None:
        try:
            wait()
        except OSError as error:
            told.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert in_time(under_way)
    store.hang_up()
    thread.join(LIMIT_S)
    assert told, "it still waits"
    store.close()
    return told[0]


class Noted(StoreClient):
    """A client that records the start of a wait."""

    waits = False

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.waits = True
        super().wait(keys, timeout)


def test_who_waits_for_a_key_can_be_called_off(server: TCPStore):
    store = Noted(f"127.0.0.1:{server.port}/off", LIMIT_S)
    store.connect()

    def waits() -> bool:
        begun = store.waits
        time.sleep(0.05)  # so long it takes at most to ask
        return begun

    assert "the store at 127.0.0.1" in woken(store, lambda: store.get("never"), waits)
    with pytest.raises(OSError):
        store.set("key", "of no use")


def test_who_waits_for_a_silent_server_can_be_called_off():
    """The server accepts connections and never answers, as the kernel does for a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store, greeted = StoreClient(f"127.0.0.1:{silent.getsockname()[1]}/a", LIMIT_S), []

        def heard() -> bool:
            greeted.append(silent.accept()[0])
            return bool(greeted[0].recv(10))

        assert "closed the connection" in woken(store, store.connect, heard)
        greeted[0].close()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says that a connection is not made yet")
def test_who_waits_for_a_connection_can_be_called_off():
    """The server's queue is full, as if its host were gone."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        port = silent.getsockname()[1]
        crowd = [socket.socket() for _ in range(4)]
        for sock in crowd:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))

        def connecting() -> int:
            rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()]
            return sum(row[2].endswith(f":{port:04X}") and row[3] == "02" for row in rows)  # SYN sent

        before = connecting()
        store = StoreClient(f"127.0.0.1:{port}/a", LIMIT_S)
        assert f"the store at 127.0.0.1:{port}" in woken(store, store.connect, lambda: connecting() > before)
        for sock in crowd:
            sock.close()


def test_who_hangs_up_first_is_heard():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = StoreClient(f"127.0.0.1:{silent.getsockname()[1]}/a", LIMIT_S)
        store.hang_up()
        with pytest.raises(OSError, match="cancelled"):
            store.connect()
        store.close()


def test_what_is_no_store_is_told():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}/a"
        store = StoreClient(address, LIMIT_S)
        thread = threading.Thread(target=lambda: other.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n"))
        thread.start()
        with pytest.raises(OSError, match=r"the store at 127.0.0.1:\d+ is not torch's TCPStore"):
            store.connect()
        thread.join()
        store.close()
    with pytest.raises(OSError, match=r"the store at 127.0.0.1:\d+: .*refused"):
        StoreClient(address, LIMIT_S).connect()  # where nobody listens any more


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's resolver")
def test_names_are_off_in_one_thread_and_for_a_while():
    address = ("::ffff:192.0.2.1", 1, 0, 0)  # an address of nobody's: not in any file, and asked for in no other way

    def name() -> str:
        return socket.getnameinfo(address, socket.NI_NUMERICSERV)[0]

    elsewhere = []
    with without_dns():
        with pytest.raises(socket.gaierror, match="Temporary failure"):
            name()
        thread = threading.Thread(target=lambda: elsewhere.append(resolver_tries(fresh=True)))
        thread.start()
        thread.join()
        assert resolver_tries() == 0
    assert resolver_tries() > 0 and elsewhere[0] > 0


def resolver_tries(*, fresh: bool = False) -> int:
    """Returns the resolver's number of tries in this thread."""
    libc = ctypes.CDLL(None)
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int * 2)
    if fresh:
        libc.__res_init()
    return int(libc.__res_state().contents[1])
