"""Groups over the wire: ranks in threads, real group servers as children of this process, a lighthouse in a thread."""

from __future__ import annotations

import asyncio
import math
import os
import queue
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import grpc
import pytest

from ft import LighthouseServer
from ft.children import LAUNCHER_SIGNALS
from ft.compat.group import TorchftConnection
from ft.protocol import messages as m
from ft.protocol.group import GroupConfig
from ft.rpc import codec
from ft.rpc.access import Access, this_host
from ft.rpc.clients import GroupClient, GroupServerProcess, Stale
from ft.rpc.driver import now_s
from ft.rpc.generated import pharos_pb2, torchft_pb2
from ft.rpc.group_server import GroupService, Process, RankReports, Settings
from ft.rpc.lighthouse_link import PharosConnection
from ft.rpc.serving import CallRefused
from ft.seam import GroupEnded
from tests.counting import counting
from tests.rpc.peer import ScriptedLighthouse
from tests.rpc.wire import ROOT, WAIT_S, Wire, refused

RANKS = 2
R = TypeVar("R")


class Client(GroupClient):
    """A client that keeps the server's Waits messages."""

    def __init__(self, address: str, group_rank: int) -> None:
        super().__init__(address, group_rank)
        self.waits: queue.Queue[m.Waits] = queue.Queue()

    def on_waits(self, waits: m.Waits) -> None:
        super().on_waits(waits)
        self.waits.put(waits)


class Team:
    """One group: its server and a client for each rank, which notes what its stream says."""

    def __init__(self, lighthouse: str, name: str, **settings: Any) -> None:
        self.server = GroupServerProcess(Settings(f"{name}:1", RANKS, lighthouse, f"{name}:29500", **settings))
        self.ranks = [Client(self.server.address, rank) for rank in range(RANKS)]
        self.heard: queue.Queue[m.Notice | str] = queue.Queue()

    def watch(self) -> None:
        for rank in self.ranks:
            rank.watch(self.heard.put, self.heard.put, pid=0)  # this process is not to be killed

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.server.close()


def together(*calls: Callable[[], R]) -> list[R]:
    """Runs all at once, each in a thread; returns their answers, or raises the first error."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures: list[Future[R]] = [threads.submit(call) for call in calls]
        return [future.result(WAIT_S * 2) for future in futures]


def quorum(*teams: Team, known: int = 0, failed: bool = False) -> list[Any]:
    def ask(team: Team, rank: int) -> Callable[[], Any]:
        call = m.RankCall(rank, m.Member(""), f"state of {team.server.address} {rank}", known=known, failed=failed)
        return lambda: team.ranks[rank].quorum(call, WAIT_S)

    return together(*(ask(team, rank) for team in teams for rank in range(RANKS)))


def service_and_end(size: int = 1, **config: Any) -> tuple[GroupService, asyncio.Future[str]]:
    """Returns a group's service, in this process and without a lighthouse, and a future of the reason of its end."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    return GroupService(GroupConfig("a:1", size, **config), "http://127.0.0.1:1", Access(), ended.set_result), ended


@pytest.fixture
def team(lighthouse: LighthouseServer) -> Iterator[Callable[..., Team]]:
    with ExitStack() as stack:
        yield lambda name, **settings: stack.enter_context(closing(Team(lighthouse.address(), name, **settings)))


def test_two_groups_from_first_quorum_to_death(team: Callable[..., Team]):
    a, b = team("a"), team("b")
    a.watch(), b.watch()
    parts = quorum(a, b)
    first = parts[0].quorum_id
    assert {part.quorum_id for part in parts} == {first}
    assert [(part.replica_id, part.replica_rank) for part in parts] == [("a:1", 0), ("a:1", 0), ("b:1", 1), ("b:1", 1)]
    assert {part.store_address for part in parts} == {"a:29500", "b:29500"}, "ranks meet at different stores"
    assert a.ranks[0].checkpoint_metadata(1, WAIT_S) == f"state of {a.server.address} 1"

    # asked again, nothing has changed: the ranks keep their process group
    assert all(part.same_generation and part.quorum_id == first for part in quorum(a, b, known=first))

    def vote(rank: int, verdict: Any = "yes", attempt: int = 0) -> m.Outcome:
        return a.ranks[rank].vote(m.Vote(rank, "commit", first, attempt, 0, verdict), WAIT_S)

    yes, same = together(lambda: vote(0), lambda: vote(1))
    assert yes == same and (yes.verdict, yes.reason) == ("yes", "all ranks voted yes")
    assert vote(1) == yes, "outcomes are kept"
    with pytest.raises(Stale, match="a vote for quorum 9"):
        a.ranks[0].vote(m.Vote(0, "commit", 9, 0, 0, "yes"), WAIT_S)
    assert vote(0, "failed", attempt=1).verdict == "failed", "the first no decides at once"
    assert isinstance(a.heard.get(timeout=WAIT_S), m.GenerationAborted), "and is told to the other rank"

    os.kill(b.server.pid, signal.SIGKILL)
    lost = m.MemberLost(first, ("b:1",), "its connection broke")
    assert [a.heard.get(timeout=WAIT_S), a.heard.get(timeout=WAIT_S)] == [lost, lost]
    assert "broke" in b.heard.get(timeout=WAIT_S), "its own ranks are told to exit"  # type: ignore[operator]


def test_a_lost_group_returns_under_a_new_id_and_a_clean_one_leaves(team: Callable[..., Team]):
    a, b = team("a"), team("b")
    a.watch(), b.watch()
    first = quorum(a, b)[0].quorum_id
    for rank in b.ranks:  # each rank asks for it, once is enough
        rank.rejoin_under_new_id(first, "too slow")
    assert a.heard.get(timeout=WAIT_S) == m.MemberLost(first, ("b:1",), "too slow")
    parts = quorum(a, b, known=first, failed=True)
    assert parts[0].quorum_id > first and parts[0].members == ("a:1", "b:1.1")
    for rank in b.ranks:  # whoever comes second changes nothing
        rank.leave(clean=True, reason="done")
    b.ranks[0].close()
    b.server.close()
    ended = iter(lambda: b.heard.get(timeout=WAIT_S), None)  # after the notices of the old generation
    assert "the group has left: done" in ended, "the other rank has not closed yet"
    change = m.ChangeAnnounced(parts[0].quorum_id, "b:1.1 done")
    # after what both ranks heard of the old generation
    assert change in iter(lambda: a.heard.get(timeout=WAIT_S), None)


def test_a_rank_that_dies_takes_its_group_along(team: Callable[..., Team]):
    """The group ends even if a child that the rank has forked lives on, with its end of the stream."""
    a = team("a")
    program = (
        f"import os, sys, threading; sys.path.insert(0, {str(ROOT)!r})\n"
        "from ft.rpc.clients import GroupClient\n"
        "heard = threading.Event()\n"
        "GroupClient(sys.argv[1], int(sys.argv[2])).watch(lambda notice: heard.set(), print)\n"
        "heard.wait()\n"
        "if os.fork():\n"
        "    print('heard', flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(0)\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, a.server.address, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for rank in range(RANKS)
    ]
    for rank in a.ranks:  # a no that the other rank hears, once its stream is open: so the server knows both
        rank.vote(m.Vote(rank.group_rank, "commit", 0, rank.group_rank, 0, "failed"), WAIT_S)
    for process in ranks:
        assert process.stdout and process.stdout.readline() == b"heard\n"
    ranks[1].kill()
    ranks[1].wait()
    assert ranks[0].wait(WAIT_S) == -signal.SIGKILL
    for process in ranks:
        process.communicate()


def test_a_lighthouse_that_is_gone_is_told_to_the_ranks_at_once(
    team: Callable[..., Team], lighthouse: LighthouseServer
):
    a = team("a", quorum_retries=0)
    lighthouse.shutdown()
    with pytest.raises(RuntimeError, match="UNAVAILABLE: the lighthouse did not answer in 1 tries"):
        quorum(a)


def test_a_wrong_token_is_told_to_the_ranks():
    guarded = LighthouseServer("127.0.0.1:0", 1, token="0123456789abcdef")
    team = Team(guarded.address(), "a")
    with pytest.raises(RuntimeError, match="this job has a token"):
        quorum(team)
    team.close()
    guarded.shutdown()


def test_bad_words_from_a_rank_are_refused(team: Callable[..., Team]):
    a = team("a")
    wire = Wire(a.server.address)
    call = pharos_pb2.RankCall(group_rank=7)
    assert wire.code("/pharos.Group/Quorum", call.SerializeToString())[0] == "INVALID_ARGUMENT"
    assert wire.code("/pharos.Group/CheckpointMetadata", b"")[1] == "rank not found"
    assert wire.code("/torchft.ManagerService/CheckpointMetadata", b"")[1] == "rank not found"
    with pytest.raises(TimeoutError):
        a.ranks[0].quorum(m.RankCall(0, m.Member(""), checkpoint_metadata="here"), 0.3)
    assert a.ranks[0].checkpoint_metadata(0, WAIT_S) == "here", "as soon as a rank has asked, whoever else has not"
    wire.close()


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (pharos_pb2.Report(phase="x" * 600), "phase: 600 characters, legal is up to 512"),
        (pharos_pb2.Report(goodput_s=math.inf), "goodput_s = inf: must be finite and not below 0"),
        (pharos_pb2.Report(step=1 << 50), "step = 1125899906842624: legal is -1 to"),
    ],
)
def test_a_report_that_the_lighthouse_would_refuse_is_refused_here(
    team: Callable[..., Team], report: pharos_pb2.Report, said: str
):
    """The report of one rank would cost the group its stream, and so the group."""
    wire = Wire(team("a").server.address)
    up = [pharos_pb2.RankUp(hello=pharos_pb2.RankHello(group_rank=1)), pharos_pb2.RankUp(report=report)]
    call = wire.channel.stream_stream("/pharos.Group/Watch")(iter([one.SerializeToString() for one in up]))
    code, reason = refused(lambda: list(call))
    assert code == "INVALID_ARGUMENT" and said in reason
    wire.close()


def test_a_fault_of_ours_ends_the_group_and_is_said(caplog: pytest.LogCaptureFixture):
    """A failure of any task ends the group: a task that died unseen would leave ranks waiting for ever."""

    async def story() -> None:
        service, ended = service_and_end()

        async def fails() -> None:
            raise KeyError("no such key")

        service.spawn(fails())
        assert await asyncio.wait_for(ended, WAIT_S) == "a fault in the group server: KeyError('no such key')"
        await service.close()

    asyncio.run(story())
    assert "Traceback" in caplog.text


def test_a_rank_that_wants_a_new_id_after_the_leave_of_another_gets_none(team: Callable[..., Team]):
    """The connection to the lighthouse is closed then: an error of it would be a fault, for which the server kills its trainers."""
    a, b = team("a"), team("b")
    a.watch()
    first = quorum(a, b)[0].quorum_id
    for rank in range(RANKS):  # the notice to the other one shows that its stream is open
        a.ranks[rank].vote(m.Vote(rank, "commit", first, rank, 0, "failed"), WAIT_S)
        assert isinstance(a.heard.get(timeout=WAIT_S), m.GenerationAborted)
    a.ranks[0].leave(clean=True, reason="done")
    a.ranks[1].rejoin_under_new_id(first, "too slow")
    a.ranks[1].close()  # returns once the server has handled that
    a.ranks[0].close()
    assert os.waitstatus_to_exitcode(os.waitpid(a.server.pid, 0)[1]) == 0


def test_a_late_vote_fails_no_call_for_a_quorum():
    """The vote is refused; the same rank's call for a quorum waits on."""

    async def story() -> None:
        service, _ = service_and_end(2)
        call = asyncio.ensure_future(service.ask((0, None), m.RankCall(0, m.Member(""))))
        await asyncio.sleep(0)
        late = m.Vote(0, "commit", 9, 0, 0, "yes")
        with pytest.raises(CallRefused, match="a vote for quorum 9; this group is in 0"):
            await service.ask((0, late.key), late)
        for _ in range(3):  # whatever was woken runs
            await asyncio.sleep(0)
        assert not call.done() and service.machine.waiting.keys() == {0}
        call.cancel()
        await service.close()

    asyncio.run(story())


@pytest.mark.parametrize("connection", [PharosConnection, TorchftConnection])
def test_a_request_that_waits_for_other_groups_is_no_failed_try(connection: Any):
    """Its time is up, and it is sent again: what the lighthouse answers then is the answer."""
    theirs = torchft_pb2.LighthouseQuorumResponse(quorum=torchft_pb2.Quorum(quorum_id=1))
    ours = pharos_pb2.QuorumReply(restore=pharos_pb2.Restore(settled=7))
    reply, settled = (ours, 7) if connection is PharosConnection else (theirs, 0)

    async def story() -> None:
        requests, heard, over = [], asyncio.Queue[m.Event](), asyncio.Event()

        class Quorums(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, details: Any) -> Any:
                async def quorum(request: bytes, context: Any) -> bytes:
                    requests.append(request)
                    if len(requests) < 3:
                        await over.wait()
                    return bytes(reply.SerializeToString())

                return grpc.unary_unary_rpc_method_handler(quorum)

        class Impatient(connection):
            call_s = 0.05

        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Quorums(),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        link = Impatient(address, Access(), heard.put_nowait, asyncio.ensure_future, lambda o: None)
        link.call(m.Call(m.Member("a:1")), 0.0)
        assert await asyncio.wait_for(heard.get(), WAIT_S) == m.LighthouseRequiresRestore(settled)
        assert len(requests) == 3 and requests[0] == requests[2] and heard.empty()
        over.set()
        await link.close()
        await server.stop(0)

    asyncio.run(story())


def _streaming(handle: Callable[[Any], Any]) -> tuple[Any, int]:
    """Returns a server whose streams are all served by `handle`, and its port."""

    class Streams(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            async def serve(_: Any, context: Any) -> None:
                await context.send_initial_metadata(())
                await handle(context)

            return grpc.stream_stream_rpc_method_handler(serve)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Streams(),))
    return server, server.add_insecure_port("127.0.0.1:0")


def test_who_beats_goes_on_when_the_stream_is_replaced_under_a_beat():
    """grpc cancels the task of a write into a cancelled call. A group whose beats ended unseen would be lost again and again."""

    async def story() -> None:
        over = asyncio.Event()

        async def read_nothing(context: Any) -> None:
            await over.wait()

        server, port = _streaming(read_nothing)
        await server.start()
        link = PharosConnection(f"127.0.0.1:{port}", Access(), lambda e: None, asyncio.ensure_future, lambda o: None)
        link.open_stream("a:1", lambda: 0)
        too_much = pharos_pb2.Report(phase="x" * (32 << 20))
        while (await asyncio.wait([beat := asyncio.ensure_future(link.send(report=too_much))], timeout=0.01))[0]:
            pass  # there is no stream yet
        link.open_stream("a:1.1", lambda: 0)
        await asyncio.wait_for(beat, WAIT_S)
        link.open_stream("a:1.2", lambda: 0)
        gone = asyncio.ensure_future(link.send(report=pharos_pb2.Report()))
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        over.set()
        await link.close()
        await server.stop(0)

    asyncio.run(story())


def test_a_stream_that_breaks_before_its_hello_is_opened_again():
    """The last beat of the former stream is still on its way; the group continues."""

    async def story() -> None:
        tries, again = [], asyncio.Event()
        link = PharosConnection("127.0.0.1:1", Access(), lambda e: None, asyncio.ensure_future, lambda o: None)

        async def write(stream: Any, up: Any) -> None:
            tries.append(up)
            if len(tries) == 1:
                raise asyncio.InvalidStateError("RPC already finished.")  # as grpc has it
            again.set()

        link.write = write  # type: ignore[method-assign]
        link.open_stream("a:1", lambda: 0)
        await asyncio.wait_for(again.wait(), WAIT_S)
        await link.close()

    asyncio.run(story())


def test_a_stream_that_is_opened_again_names_the_newest_quorum_and_its_epoch():
    async def story() -> None:
        hellos = asyncio.Queue[Any]()
        known = m.Quorum(3, (m.Member("a:1", "http://a", "a:2"),), epoch="job")

        async def answer_and_end(context: Any) -> None:
            hellos.put_nowait(codec.parse(pharos_pb2.Up, await context.read()).hello)
            reply = pharos_pb2.QuorumReply(quorum=codec.to_message(known))
            await context.write(pharos_pb2.Down(answer=reply).SerializeToString())

        server, port = _streaming(answer_and_end)
        await server.start()
        link = PharosConnection(f"127.0.0.1:{port}", Access(), lambda e: None, asyncio.ensure_future, lambda o: None)
        link.open_stream("a:1", lambda: 7)
        found = [await asyncio.wait_for(hellos.get(), WAIT_S) for _ in range(2)]
        assert [(hello.quorum_id, hello.epoch, hello.settled) for hello in found] == [(0, "", 7), (3, "job", 7)]
        await link.close()
        await server.stop(0)

    asyncio.run(story())


def test_a_word_that_cannot_be_read_is_passed_over():
    """Both ends skip a message of another version: later messages arrive, and the stream stays open."""
    known, strange = m.GenerationAborted(3, "over"), pharos_pb2.Notice()
    down = [pharos_pb2.Down(notice=strange), pharos_pb2.Down(notice=codec.notice_message(known))]
    rank_down = [pharos_pb2.RankDown(notice=strange), pharos_pb2.RankDown(notice=codec.notice_message(known))]

    async def story(told: list[Any], listen: Callable[[str, Callable[[Any], None]], Any]) -> Any:
        heard: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        streams = 0

        async def tell(context: Any) -> None:
            nonlocal streams
            streams += 1
            for data in (b"\xff", *(word.SerializeToString() for word in told)):
                await context.write(data)
            while await context.read() is not grpc.aio.EOF:
                pass

        server, port = _streaming(tell)
        await server.start()
        loop = asyncio.get_running_loop()
        close = listen(f"127.0.0.1:{port}", lambda event: loop.call_soon_threadsafe(heard.set_result, event))
        event = await asyncio.wait_for(heard, WAIT_S)
        assert streams == 1
        await asyncio.to_thread(close) if not asyncio.iscoroutinefunction(close) else await close()
        await server.stop(0)
        return event

    def as_group(address: str, hear: Callable[[Any], None]) -> Any:
        link = PharosConnection(address, Access(), hear, asyncio.ensure_future, lambda o: None)
        link.open_stream("a:1", lambda: 0)
        return link.close

    def as_rank(address: str, hear: Callable[[Any], None]) -> Any:
        client = GroupClient(address, 0)
        client.watch(hear, lambda why: None, pid=0)
        return client.close

    assert asyncio.run(story(down, as_group)) == asyncio.run(story(rank_down, as_rank)) == known


def test_an_operators_orders():
    """Drained, its trainers get one SIGTERM: a second would end them without a checkpoint. Killed, it says its last word and stays away:
    told in answer that it is lost, it would return under a new id, and the others form a quorum with what is about to die."""

    async def story() -> tuple[list[signal.Signals], str, str]:
        service, ended = service_and_end()
        sent: list[signal.Signals] = []

        trainer: Any = SimpleNamespace(send=sent.append)
        service.processes[0] = trainer
        for _ in range(3):
            service.on_operator_order(pharos_pb2.Order(kind="drain", reason="r"))
        service.on_operator_order(pharos_pb2.Order(kind="dance"))
        service.on_operator_order(pharos_pb2.Order(kind="kill", reason="r"))
        service.on_lighthouse_event(m.LighthouseRefused("a:1", "LOST", "killed"))
        why, replica_id = await asyncio.wait_for(ended, WAIT_S), service.machine.replica_id
        await service.close()
        return sent, why, replica_id

    assert asyncio.run(story()) == ([signal.SIGTERM], "killed by an operator: r", "a:1")


def test_a_server_that_cannot_start_is_one_message(capfd: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings("a:1", 1, "http://127.0.0.1:1", host="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(
            ChildProcessError,
            match=r"^the group server ended with exit code 2; its output is on stderr$",
        ):
            GroupServerProcess(settings)
    assert f"group server: its address 127.0.0.1:{settings.port}: the port is in use, perhaps" in capfd.readouterr().err
    with pytest.raises(
        ValueError, match=r"^a group's server on 10\.1\.2\.3: others could reach it, and the job has no token"
    ):
        replace(settings, host="10.1.2.3")


def test_a_server_listens_at_the_address_of_its_group_only(lighthouse: LighthouseServer):
    settings = Settings("a:1", 1, lighthouse.address(), host="127.0.0.1", access=Access("0123456789abcdef"))
    with closing(GroupServerProcess(settings)) as server, socket.socket() as other:
        other.bind(("127.0.0.2", int(server.address.rpartition(":")[2])))  # it is free there


def test_the_server_dies_with_whoever_started_it(lighthouse: LighthouseServer):
    """The server dies by the kernel's signal (start from the main thread; a forked worker holds the pipe open), or by the pipe's end."""
    program = f"""
import os, sys, threading, time; sys.path.insert(0, {str(ROOT)!r})
from ft.rpc.clients import GroupServerProcess
from ft.rpc.group_server import Settings
def start():
    server = GroupServerProcess(Settings('a:1', 1, {lighthouse.address()!r}))
    worker = os.fork() if sys.argv[1] == 'main' else os.getpid()
    if worker == 0:
        os.close(1)
    else:
        print(server.pid, worker, flush=True)
start() if sys.argv[1] == 'main' else threading.Thread(target=start).start()
time.sleep(60)
"""
    for where in ("main", "thread"):
        parent = subprocess.Popen([sys.executable, "-c", program, where], stdout=subprocess.PIPE)
        assert parent.stdout
        pid, worker = map(int, parent.stdout.readline().split())
        server = os.pidfd_open(pid)
        assert not select.select([server], [], [], 0.3)[0], "the thread that started it may end before the process"
        os.kill(parent.pid, signal.SIGKILL)
        parent.communicate()
        gone = select.select([server], [], [], WAIT_S)[0]
        os.close(server)
        if worker != parent.pid:
            os.kill(worker, signal.SIGKILL)
        assert gone, f"started from {where}, it lives on"


def test_what_a_scheduler_sends_to_every_process_is_not_for_the_server(team: Callable[..., Team]):
    """The ranks answer it, with a Leave, which this server has to carry."""
    one = team("a")
    for number in LAUNCHER_SIGNALS:
        os.kill(one.server.pid, number)
    wire = Wire(one.server.address)
    call = wire.begin("/pharos.Group/Quorum", b"no message")
    assert call.exception(WAIT_S).code() is not grpc.StatusCode.UNAVAILABLE
    wire.close()


def test_calls_of_one_rank_are_bounded(team: Callable[..., Team]):
    wire = Wire(team("a").server.address)
    ended: queue.Queue[Any] = queue.Queue()
    calls = [wire.begin("/pharos.Group/Quorum", pharos_pb2.RankCall().SerializeToString()) for _ in range(65)]
    for call in calls:
        call.add_done_callback(ended.put)
    assert "64 calls of rank 0 are waiting" in ended.get(timeout=WAIT_S).details()
    wire.close()


def test_a_vote_of_a_thread_whose_rank_has_closed_ends_as_a_lost_group_does():
    """A vote in the background may start after the trainer's thread has closed the connection."""
    rank = Client("127.0.0.1:1", 0)
    rank.close()
    with pytest.raises(GroupEnded, match="closed channel"):
        rank.outcome(m.Vote(0, "commit", 9, 0, 0, "yes"))


def test_no_torch_in_a_group_server():
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import ft.rpc.group_server, ft.rpc.clients\n"
        "assert not {'torch', 'numpy', 'aiohttp'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=50).returncode == 0


def test_a_trainer_that_stops_and_goes_on_is_seen_to_go_on():
    """A slow machine: looks that are as far apart as beats would find it stopped each time."""

    async def beats() -> int:
        looks, beaten = iter([True] * 5), asyncio.Event()
        service, _ = service_and_end(times=m.Timeouts(beat_s=3600.0))

        async def send(report: object) -> None:
            beaten.set()

        trainer: Any = SimpleNamespace(is_stopped=lambda: next(looks, False), is_dying=lambda: False)
        service.processes[0] = trainer
        service.link.send = send  # type: ignore[method-assign]
        service.start()
        await asyncio.wait_for(beaten.wait(), WAIT_S)
        await service.close()
        return len([*looks])

    assert asyncio.run(beats()) == 0


def test_torchfts_lighthouse_gets_no_heartbeat_of_a_stopped_trainer():
    """Its connection sends them itself, and the group's server lives on."""

    async def looks_left() -> int:
        looks, lighthouse = iter([True] * 5), ScriptedLighthouse()
        config = GroupConfig("a:1", 1)
        service = GroupService(config, lighthouse.address, Access(), lambda reason: None, TorchftConnection)
        trainer: Any = SimpleNamespace(is_stopped=lambda: next(looks, False), is_dying=lambda: False)
        service.processes[0] = trainer
        service.start()
        await asyncio.to_thread(lighthouse.beats.get, timeout=WAIT_S)
        left = len([*looks])
        await service.close()
        lighthouse.close()
        return left

    assert asyncio.run(looks_left()) == 0


def test_the_name_of_a_trainer_that_was_killed_and_cannot_die_gets_free():
    """The trainer waits for a file server that is away; the server is its child and would beat for as long."""

    async def ends() -> str:
        service, over = service_and_end(times=m.Timeouts(beat_s=0.01, heartbeat_timeout_s=0.05))
        trainer: Any = SimpleNamespace(is_stopped=lambda: False, is_dying=lambda: True)
        service.processes[0] = trainer
        service.start()
        try:
            return await asyncio.wait_for(over, WAIT_S)
        finally:
            await service.close()

    assert asyncio.run(ends()).startswith("ranks [0] were killed 0.05 s ago, and have not exited")


@pytest.mark.parametrize(
    ("line", "dying"),
    [
        ("SigPnd:\t0000000000000100", True),
        ("ShdPnd:\t0000000000000100", True),
        ("ShdPnd:\t0000000000004000", False),  # SIGTERM
        ("State:\tZ (zombie)", True),
        ("State:\tD (disk sleep)", False),
    ],
)
def test_who_is_dying_is_told_by_the_signals_that_wait(tmp_path: Path, line: str, dying: bool):
    assert not Process(os.getpid()).is_dying()
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text(f"Name:\tpython\n{line}\n")
    assert Process(7, proc=tmp_path).is_dying() is dying


def test_two_machines_of_one_name_are_two(tmp_path: Path):
    """A server that takes the pid of another machine's rank for one of its own kills a stranger."""

    def machine(name: str, boot_id: str) -> Path:
        (tmp_path / name / "self" / "ns").mkdir(parents=True)
        # the first namespace, on every machine
        (tmp_path / name / "self" / "ns" / "pid").symlink_to("pid:[4026531836]")
        (boot := tmp_path / name / "sys" / "kernel" / "random").mkdir(parents=True)
        (boot / "boot_id").write_text(f"{boot_id}\n")
        return tmp_path / name

    one, same, other = machine("one", "0b7e"), machine("same", "0b7e"), machine("other", "91ac")
    assert this_host(one) == this_host(same) != this_host(other)
    assert this_host(tmp_path).split() == [socket.gethostname()], "without /proc"


def test_a_group_that_waits_is_told_what_for_and_sigterm_lets_its_ranks_go(team: Callable[..., Team]):
    """The lighthouse wants two groups; the words are its own, and come with each wait."""
    a, b = team("a"), team("b")
    a.watch(), b.watch()

    def wait_for_b() -> None:
        while "min_replicas is 2" not in a.ranks[0].waits.get(timeout=WAIT_S).reason:
            pass

    def ask(threads: ThreadPoolExecutor, known: int) -> list[Future[Any]]:
        calls = [m.RankCall(i, m.Member(""), known=known, failed=known > 0, number=1 + known) for i in range(RANKS)]
        return [threads.submit(a.ranks[call.group_rank].quorum, call, WAIT_S) for call in calls]

    with ThreadPoolExecutor(RANKS) as threads:
        answers = ask(threads, 0)
        wait_for_b()
        known = quorum(b)[0].quorum_id
        assert {answer.result(WAIT_S).quorum_id for answer in answers} == {known}
        b.ranks[0].leave(clean=False, reason="gone")
        a.ranks[0].waits.queue.clear()
        answers = ask(threads, known)
        wait_for_b()
        a.ranks[1].want_to_leave()
        assert [answer.result(WAIT_S) for answer in answers] == [m.Released(), m.Released()]


def test_one_rank_votes_for_all(team: Callable[..., Team]):
    a, b = team("a"), team("b")
    a.watch(), b.watch()
    first = quorum(a, b)[0].quorum_id
    outcome = a.ranks[0].vote(m.Vote(0, "commit", first, 0, 0, "yes", joint=True), WAIT_S)
    assert outcome.verdict == "yes" and a.ranks[1].vote(m.Vote(1, "commit", first, 0, 0, "yes"), WAIT_S) == outcome


def test_reports_of_ranks_come_to_one():
    ranks = RankReports(3)
    word = pharos_pb2.Report
    ranks.update(0, word(step=7, waiting=True, healed_bytes=5))
    ranks.update(1, word(waiting=True, summed=True, settled=4, healed_bytes=6))
    assert not ranks.waiting, "the third has said nothing"
    ranks.update(2, word(waiting=True))
    assert ranks.waiting and ranks.aggregate().healed_bytes == 11
    ranks.update(0, word(step=7, waiting=True, summed=True, settled=6))
    ranks.update(2, word(waiting=True, summed=True, phase="checkpoint", phase_limit_s=300.0))
    total = ranks.aggregate()
    assert not total.waiting, "none is in the sums any more: they wait for nobody else"
    assert (total.step, total.settled, total.phase, total.phase_limit_s) == (7, 6, "checkpoint", 300.0)
    ranks.update(2, word())
    assert ranks.aggregate().phase_limit_s == 0 and not ranks.aggregate().summed
    ranks.update(1, word(settled=99))
    assert ranks.settled == 6, "other ranks repeat theirs seldom: it may be of another history than the step"
    ranks.update(0, word(step=m.VOID, settled=99))
    assert ranks.settled == 0, "of a rank that heals it is a step of another history"


def test_a_rank_whose_report_is_of_an_older_quorum_is_not_waited_for_others():
    """The rank may have hung since. A rank of an older version names no quorum, and counts as before."""
    ranks, word = RankReports(2), pharos_pb2.Report
    ranks.begin_quorum(1)
    for rank in range(2):
        ranks.update(rank, word(waiting=True, launched=100, quorum_id=1))
    assert ranks.waiting and (ranks.aggregate().launched, ranks.aggregate().quorum_id) == (100, 1)
    ranks.begin_quorum(2)
    total = ranks.aggregate()
    assert not ranks.waiting and (total.waiting, total.launched, total.quorum_id) == (False, 0, 2)
    ranks.update(0, word(waiting=True, launched=1, quorum_id=2))
    ranks.update(1, word(waiting=True, launched=100, quorum_id=1))
    assert not ranks.waiting and ranks.aggregate().launched == 0
    ranks.update(1, word(waiting=True, launched=1))
    assert ranks.waiting and ranks.aggregate().launched == 1


def test_a_wait_of_an_older_quorum_ends_with_the_answer_of_the_next():
    """The ranks' watchdogs would stand still for others, while their own trainer hangs."""

    async def waits() -> list[bool]:
        service, _ = service_and_end()
        service.link.call = lambda call, delay_s: None  # type: ignore[method-assign]

        def answer(quorum_id: int) -> None:
            service.driver.feed(
                m.RankCall(0, m.Member(""), known=quorum_id - 1, failed=quorum_id > 1, number=quorum_id)
            )
            service.driver.feed(m.LighthouseAnswered(m.Quorum(quorum_id, (m.Member("a:1"), m.Member("b:1")))))

        answer(1)
        service.reports.update(0, pharos_pb2.Report(waiting=True, quorum_id=1))
        service.driver.feed(m.ReductionAwaited(True))
        found = [service.machine.waits(now_s()) is not None]
        answer(2)
        found.append(service.machine.waits(now_s()) is not None)
        await service.close()
        return found

    assert asyncio.run(waits()) == [True, False]


def test_a_report_costs_the_same_however_many_ranks_there_are():
    """Counted: the calls that are made to take one in."""

    def calls(size: int) -> int:
        ranks = RankReports(size)
        for rank in range(size):
            ranks.update(rank, pharos_pb2.Report(waiting=True))
        with counting() as seen:
            ranks.update(1, pharos_pb2.Report(waiting=False))
            assert not ranks.waiting
        return seen[""]

    assert calls(2) == calls(64)
