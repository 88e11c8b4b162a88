"""The server of one replica group: a child process of its rank 0, so that it sends heartbeats even while a trainer holds the GIL.

    ranks (clients.GroupClient) -> pharos.Group           -> ft.protocol.group's machine -> lighthouse_link.PharosConnection -> lighthouse
    torchft's ManagerClient     -> torchft.ManagerService

clients.GroupServerProcess starts it: `python -m ft.rpc.group_server` reads Settings as one line of JSON from stdin, prints
{"address": ...}, and ends when stdin is closed. Exit code: 0 the group left, 1 it ended by a fault or its parent is gone, 2 bad settings.
No torch here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ft.children import die_with
from ft.protocol import messages as m
from ft.protocol.group import GroupConfig, GroupMachine
from ft.rpc import codec
from ft.rpc.access import Access, Endpoint, Tls, all_interfaces, this_host
from ft.rpc.driver import Driver, now_s
from ft.rpc.generated import pharos_pb2
from ft.rpc.lighthouse_link import LighthouseConnection, PharosConnection
from ft.rpc.serving import Outbox, Pending, PendingCalls, Server, refused, stream, unary
from ft.rpc.stderr_log import log_to_stderr

TICK_S = 0.5
# Interval of checks while a trainer is stopped: one that is stopped for short times only must get a heartbeat through in between.
RECHECK_S = 0.05
END_NOTICE_S = 0.2  # time for ranks to read the reason before they are killed
log = logging.getLogger("pharos.group")
CallKey = tuple[int, m.VoteKey | None]  # key of a waiting call: (group_rank, Vote.key; None: a quorum request)


@dataclass(frozen=True)
class Settings:
    """Settings of a group server: a line of JSON on its stdin. Raises ValueError if others could reach it without token or `insecure`."""

    replica_id: str
    world_size: int
    lighthouse: str  # http://host:port
    store_address: str = ""
    # address of this host, at which it listens; "": all addresses and the host name, without a token loopback
    host: str = ""
    port: int = 0
    wire: Literal["pharos", "torchft"] = "pharos"  # protocol of the lighthouse
    access: Access = field(default_factory=Access)
    times: m.Timeouts = field(default_factory=m.Timeouts)
    quorum_retries: int | None = None
    max_active_groups: int | None = None
    parent: int = 0  # process ID (pid) of rank 0; 0: do not end with it

    def __post_init__(self) -> None:
        if self.host and not (Endpoint(self.host, 0).loopback or self.access.token or self.access.insecure):
            raise ValueError(
                f"a group's server on {self.host}: others could reach it, and the job has no token: set PHAROS_TOKEN_FILE or PHAROS_TOKEN; "
                "nearest: 127.0.0.1"
            )


class RankReports:
    """The newest report of each rank, and their aggregate. The cost of a report does not depend on the number of ranks. A report from an
    older quorum than the group's does not count as waiting, nor do its launched attempts: its rank may hang since."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._quorum_id = 0  # of the newest quorum that the ranks were answered with
        self._reports: dict[int, Any] = {}  # rank -> pharos_pb2.Report
        self._waiting: set[int] = set()  # ranks that have entered the all-reduce of a step
        self._summed: set[int] = set()  # ranks that have completed it
        self._blames: dict[int, tuple[str, ...]] = {}  # rank -> members that it cannot work with

    def update(self, rank: int, report: Any) -> None:
        self._reports[rank] = report
        waiting = report.waiting and self._is_current(report)
        for ranks, inside in ((self._waiting, waiting), (self._summed, waiting and report.summed)):
            (ranks.add if inside else ranks.discard)(rank)
        self.blame(rank, report.blame)

    def begin_quorum(self, quorum_id: int) -> None:
        """Drops the waits of ranks in older quorums."""
        if quorum_id != self._quorum_id:
            self._quorum_id = quorum_id
            older = {rank for rank in self._waiting if not self._is_current(self._reports[rank])}
            self._waiting -= older
            self._summed -= older

    def _is_current(self, report: Any) -> bool:
        return report.quorum_id in (0, self._quorum_id)  # 0: a rank of an older version

    def blame(self, rank: int, others: Collection[str]) -> None:
        """Replaces the list of members that this rank cannot work with."""
        if others and 0 <= rank < self._world_size:
            self._blames[rank] = tuple(others)
        else:
            self._blames.pop(rank, None)

    @property
    def blamed(self) -> list[str]:
        return sorted({other for others in self._blames.values() for other in others})

    @property
    def waiting(self) -> bool:
        """True when all ranks are in the all-reduce with other groups or past it, and some still in it: the group waits for others."""
        return len(self._waiting) == self._world_size > len(self._summed)

    @property
    def settled(self) -> int:
        """Returns the settled step of the first rank, whose step `aggregate` reports; 0 while it heals: it leaves that history."""
        first = self._reports.get(min(self._reports, default=0))
        return first.settled if first and first.step != m.VOID else 0

    def aggregate(self) -> Any:
        """Returns the group's report: that of the lowest rank that has reported, with byte counts summed over all ranks, the fewest
        attempts launched in the group's quorum, and the longest phase of any rank."""
        report, reports = pharos_pb2.Report(), list(self._reports.values())
        if reports:
            report.CopyFrom(self._reports[min(self._reports)])
            longest = max(reports, key=lambda one: one.phase_limit_s)
            if longest.phase_limit_s:
                report.phase, report.phase_limit_s = longest.phase, longest.phase_limit_s
            report.launched = min(one.launched if self._is_current(one) else 0 for one in reports)
            report.quorum_id = self._quorum_id
        for name in codec.REPORT_BYTES:
            setattr(report, name, sum(getattr(one, name) for one in reports))
        report.waiting, report.settled, report.summed = self.waiting, self.settled, False
        report.blame[:] = self.blamed
        return report


class Process:
    """A live process on this host. It is referred to by a pidfd where there are any (Linux 5.3; some containers forbid them), so that a
    signal never reaches a later process with the same pid; without one it may, in the 0.2 s before a group's trainers are killed."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self.pid, self._proc = pid, proc
        self._handle: int | None = None
        if sys.platform == "linux":
            with suppress(OSError, AttributeError):  # AttributeError: Python was built for an older kernel
                self._handle = os.pidfd_open(pid)

    def when_ended(self, do: Callable[[], None]) -> None:
        """Makes the running loop call `do` when the process has ended. Without a pidfd `do` is never called."""
        if (handle := self._handle) is None:
            return
        loop = asyncio.get_running_loop()

        def readable() -> None:
            loop.remove_reader(handle)
            do()

        loop.add_reader(handle, readable)

    def is_stopped(self) -> bool:
        """Returns True if the process is stopped by SIGSTOP or a debugger. False if unknown."""
        return self._status().get("State", "")[:1] in ("T", "t")

    def is_dying(self) -> bool:
        """Returns True if it was killed but is not gone, for example in a system call that waits for a file server. False if unknown."""
        status = self._status()
        killed = any(int(status.get(mask, "0"), 16) & 1 << signal.SIGKILL - 1 for mask in ("SigPnd", "ShdPnd"))
        return killed or status.get("State", "")[:1] == "Z"

    def _status(self) -> dict[str, str]:
        with suppress(OSError):
            text = (self._proc / str(self.pid) / "status").read_text(encoding="utf-8", errors="replace")
            return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        return {}

    def send(self, number: signal.Signals) -> None:
        """Sends a signal. Does nothing if the process is gone."""
        with suppress(ProcessLookupError, PermissionError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)
            else:
                os.kill(self.pid, number)


class GroupService:
    """Drives one group's state machine (ft.protocol.group). `end` is called with a reason when the group has ended: "" if it left."""

    def __init__(
        self,
        config: GroupConfig,
        lighthouse: str,
        access: Access,
        end: Callable[[str], None],
        connection_class: type[LighthouseConnection] = PharosConnection,
    ) -> None:
        self.config, self._end = config, end
        self.processes: dict[int, Process] = {}  # group_rank -> trainer process, if on this host
        self._pending = PendingCalls(self._on_cancelled)  # by CallKey
        self._streams: dict[int, Outbox] = {}  # by group_rank
        self.reports = RankReports(config.world_size)
        self._voted: tuple[m.Outcome | None, bytes] = (None, b"")  # newest outcome, and its message
        self._last_report = pharos_pb2.Report()  # newest report sent to the lighthouse
        self._dying_since_s: float | None = None  # since when a killed trainer has not been gone
        self._rejoined_after = 0  # id of the quorum in which the newest rejoin was requested
        self.left = False  # True: the group has left or is about to end
        self._drained = False  # True: trainers have got SIGTERM; a second one would end them at once
        self.machine = GroupMachine(config, now_s())
        handlers: dict[type[m.Effect], Callable[[Any], None]] = {
            m.CallLighthouse: lambda e: self.link.call(e.call, e.delay_s),
            m.OpenStream: lambda e: self._open_stream(e.replica_id),
            m.CloseStream: lambda e: self.link.close_stream(),
            m.AnswerRank: self._answer_rank,
            m.Waits: lambda e: self._send_down(self._streams, waits=codec.to_message(e)),
            m.AnswerVote: self._answer_vote,
            m.FailRank: self._fail_rank,
            m.NotifyRank: lambda e: self._send_down([e.group_rank], notice=codec.notice_message(e.notice)),
            m.EndGroup: lambda e: self.end(e.reason),
        }
        self.driver = Driver(self.machine, handlers, tick_s=TICK_S)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.link = connection_class(lighthouse, access, self.on_lighthouse_event, self.spawn, self.on_operator_order)
        self.routes = {
            "/pharos.Group/Quorum": unary(self._on_quorum),
            "/pharos.Group/CastVote": unary(self._on_vote),
            "/pharos.Group/Watch": stream(self._on_watch),
            "/pharos.Group/CheckpointMetadata": unary(self._on_metadata),
            "/pharos.Group/Leave": unary(self._on_leave),
        }

    def start(self) -> None:
        """Opens the stream to the lighthouse, and begins to send heartbeats."""
        self._open_stream(self.machine.replica_id)
        self.spawn(self._beat_for_ever())

    def _open_stream(self, replica_id: str) -> None:
        self.link.open_stream(replica_id, lambda: self.reports.settled, self._is_stopped)

    def _is_stopped(self) -> bool:
        """Returns True while a trainer is stopped (SIGSTOP): the group then sends no heartbeat, so that it counts as lost."""
        return any(process.is_stopped() for process in self.processes.values())

    def on_lighthouse_event(self, event: m.Event) -> None:
        """Feeds an event from the lighthouse, unless the group has left: the refusal LOST that follows its Leave would make it return under
        a new id, and the others would form a quorum with a group that is about to end."""
        if not self.left:
            self.driver.feed(event)

    async def _on_quorum(self, data: bytes, context: Any) -> bytes:
        call = codec.from_bytes(m.RankCall, data)
        self.reports.blame(call.group_rank, call.blame)  # newer than the rank's last report
        return await self.ask((call.group_rank, None), call)

    async def _on_vote(self, data: bytes, context: Any) -> bytes:
        vote = codec.from_bytes(m.Vote, data)
        return await self.ask((vote.group_rank, vote.key), vote)

    async def ask(self, key: CallKey, event: m.Event) -> bytes:
        """Feeds a rank's quorum request or vote, and waits for the answer."""
        return await self._pending.wait(key, f"rank {key[0]}", Pending(), partial(self.driver.feed, event))

    def _on_cancelled(self, key: CallKey) -> None:
        if key[1] is None:  # a vote needs no such event, since it may be cast again
            self.driver.feed(m.RankCancelled(key[0]))

    async def _on_metadata(self, data: bytes, context: Any) -> bytes:
        rank = codec.parse(pharos_pb2.AskMetadata, data).group_rank
        return pharos_pb2.Metadata(group_rank=rank, checkpoint_metadata=self.metadata_of(rank)).SerializeToString()

    async def _on_leave(self, data: bytes, context: Any) -> bytes:
        leave = codec.from_bytes(m.Leave, data)
        if self.left:  # a different rank has called this already
            return b""
        self.left = True
        # before the streams break, as this process ends with the rank that leaves first
        self._send_down(self._streams, ended=pharos_pb2.Ended(reason=f"{codec.HAS_LEFT}: {leave.reason}"[:500]))
        await self.link.leave(self.machine.replica_id, clean=leave.clean, reason=leave.reason, finished=leave.finished)
        await self.link.close()
        if not self._streams:
            self._end("")
        return b""

    def metadata_of(self, group_rank: int) -> str:
        """Returns the address at which that rank serves its state. Raises ValueError if the rank has reported none."""
        if (found := self.machine.checkpoint_metadata.get(group_rank)) is None:
            raise ValueError("rank not found")
        return found

    async def _on_watch(self, outbox: Outbox) -> None:
        up = codec.parse(pharos_pb2.RankUp, await outbox.read_hello())
        if up.WhichOneof("up") != "hello":  # checked, since a missing hello would read as that of rank 0
            raise ValueError("a stream must begin with a hello")
        hello, rank = up.hello, up.hello.group_rank
        if not 0 <= rank < self.config.world_size:
            raise ValueError(f"rank {rank}: this group has ranks 0 to {self.config.world_size - 1}")
        old, self._streams[rank] = self._streams.get(rank), outbox
        if old:
            old.end()
        if hello.pid > 0 and hello.host == this_host():
            process = Process(hello.pid)
            if self._drained and rank not in self.processes:  # the drain order came before this rank's stream
                process.send(signal.SIGTERM)
            self.processes[rank] = process
            process.when_ended(outbox.end)  # a child that it has forked, such as a DataLoader's, keeps the stream open
        try:
            self.driver.feed(m.RankStream(rank, open=True))
            while (data := await outbox.read()) is not None:
                self._on_rank_message(rank, codec.parse(pharos_pb2.RankUp, data))
        finally:
            if self._streams.get(rank) is outbox:
                del self._streams[rank]
                if not self.left:
                    self.driver.feed(m.RankStream(rank, open=False))
                elif not self._streams:
                    self._end("")

    def _on_rank_message(self, rank: int, up: pharos_pb2.RankUp) -> None:
        which = up.WhichOneof("up")
        if which == "report":
            codec.report_from(up.report)
            reports, sent, awaited = self.reports, self._last_report, self.reports.waiting
            reports.update(rank, up.report)
            self._feed_if_changed(awaited)
            if reports.waiting != sent.waiting or reports.blamed != list(sent.blame):
                self.spawn(self._beat())
        elif which == "wants_to_leave":
            self.driver.feed(m.WantsToLeave())
        elif which == "timeline_event":
            self.spawn(self.link.send(timeline_event=codec.check_timeline_event(up.timeline_event)))
        elif which == "rejoin" and not self.left and up.rejoin.quorum_id > self._rejoined_after:
            self._rejoined_after = up.rejoin.quorum_id

            async def rejoin(replica_id: str, reason: str) -> None:
                await self.link.leave(replica_id, clean=False, reason=reason)
                self.on_lighthouse_event(m.LighthouseRefused(replica_id, "LOST", reason))

            self.spawn(rejoin(self.machine.replica_id, up.rejoin.reason))

    def _feed_if_changed(self, awaited: bool) -> None:
        """Feeds the machine if the ranks' wait for other groups has begun or ended. `awaited`: True if they waited before."""
        if self.reports.waiting != awaited:
            self.driver.feed(m.ReductionAwaited(not awaited))

    async def _beat_for_ever(self) -> None:
        while True:
            was_sent = await self._beat()
            await asyncio.sleep(self.config.times.beat_s if was_sent else RECHECK_S)

    async def _beat(self) -> bool:
        """Sends a heartbeat. Returns False if a trainer is stopped."""
        if self._is_stopped():
            return False
        dying = [rank for rank, process in self.processes.items() if process.is_dying()]
        self._dying_since_s = (self._dying_since_s or now_s()) if dying else None
        timeout_s = self.config.times.heartbeat_timeout_s
        if self._dying_since_s is not None and now_s() - self._dying_since_s >= timeout_s:
            why = "and have not exited; the group ends so that it can restart under its name"
            self.end(f"ranks {dying} were killed {timeout_s:g} s ago, {why}")
        report = self._last_report = self.reports.aggregate()
        report.replica_id, report.sent_s = self.machine.replica_id, now_s()
        await self.link.send(report=report)
        return True

    def _answer_rank(self, effect: m.AnswerRank) -> None:
        match effect.answer:
            case m.QuorumResult(quorum_id):
                awaited = self.reports.waiting
                self.reports.begin_quorum(quorum_id)
                self._feed_if_changed(awaited)
                reply = pharos_pb2.RankReply(quorum=codec.to_message(effect.answer))
            case m.RestoreRequired(settled):
                reply = pharos_pb2.RankReply(restore=pharos_pb2.Restore(settled=settled))
            case m.Released():
                reply = pharos_pb2.RankReply(released=pharos_pb2.Done())
        for pending in self._pending.pop((effect.group_rank, None), []):
            pending.give(reply.SerializeToString())

    def _answer_vote(self, effect: m.AnswerVote) -> None:
        outcome = effect.outcome
        if outcome is not self._voted[0]:  # made once for all ranks
            self._voted = outcome, codec.to_message(outcome).SerializeToString()
        for pending in self._pending.pop((effect.group_rank, outcome.key), []):
            pending.give(self._voted[1])

    def _fail_rank(self, effect: m.FailRank) -> None:
        for pending in self._pending.pop((effect.group_rank, effect.vote_key), []):
            pending.fail(refused(effect.code, effect.reason))

    def _send_down(self, ranks: Iterable[int], **down: Any) -> None:
        message = pharos_pb2.RankDown(**down).SerializeToString()
        for rank in ranks:
            if outbox := self._streams.get(rank):
                outbox.send(message)

    def on_operator_order(self, order: pharos_pb2.Order) -> None:
        """Carries out an operator's order. For a drain it signals only this host's trainers: all ranks agree on a signal that one gets."""
        if order.kind == "kill":
            self.end(f"killed by an operator: {order.reason[:200]}")
        elif order.kind == "drain" and not self._drained:
            self._drained = True
            log.warning("an operator drains this group: its trainers get SIGTERM (%s)", order.reason[:200])
            for process in self.processes.values():
                process.send(signal.SIGTERM)

    def end(self, reason: str) -> None:
        """Notifies lighthouse and ranks, then kills the trainers, so that torchelastic restarts the group."""
        if not self.left:
            self.left = True
            self.spawn(self._end_now(reason))

    async def _end_now(self, reason: str) -> None:
        log.error("this group ends: %s", reason)
        self._send_down(self._streams, ended=pharos_pb2.Ended(reason=reason[:500]))
        leave = self.link.leave(self.machine.replica_id, clean=False, reason=reason)
        await asyncio.gather(leave, asyncio.sleep(END_NOTICE_S))
        await self.link.close()
        self._end(reason)

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Starts a task. An exception in it is logged, and ends the group."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception():
            log.error("a fault in the group server", exc_info=task.exception())
            self._end(f"a fault in the group server: {task.exception()!r}")

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self.link.close()


async def run(settings: Settings, parent: asyncio.Future[None], say: Callable[[str], None]) -> str:
    """Serves until the group ends; returns the reason, "" if it left. `parent` is done when rank 0 is gone; `say` prints a line."""
    # ft/compat: a group also answers torchft's clients, and its lighthouse may be torchft's.
    from ft.compat.group import TorchftConnection, TorchftGroup

    over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def end(reason: str) -> None:
        if not over.done():
            over.set_result(reason)

    access = settings.access
    reachable = bool(access.token or access.insecure)
    at = Endpoint(settings.host or (all_interfaces() if reachable else "127.0.0.1"), settings.port)
    host = settings.host or (socket.gethostname() if reachable else "127.0.0.1")
    # Filled later: the routes need the machine, the machine needs the address, and the port is known only when the server listens.
    routes: dict[str, Any] = {}
    server = Server(replace(access, tls=None), routes, [at], what="its address")
    address = f"http://{Endpoint(host, server.port)}"
    identity = settings.replica_id, settings.world_size, address, settings.store_address
    config = GroupConfig(
        *identity, settings.times, settings.quorum_retries, max_active_groups=settings.max_active_groups
    )
    connection_class = PharosConnection if settings.wire == "pharos" else TorchftConnection
    service = GroupService(config, settings.lighthouse, access, end, connection_class)
    torchft = TorchftGroup(
        config, settings.lighthouse, access, kill=service.end, metadata=service.metadata_of, spawn=service.spawn
    )
    routes.update(service.routes | torchft.routes)
    await server.start()
    say(json.dumps({"address": config.address}))
    service.start()
    ticks = asyncio.ensure_future(service.driver.run())
    try:
        watched: list[asyncio.Future[Any]] = [over, parent, ticks]
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if ticks.done():
            await ticks
        if not over.done() and not service.left:
            service.end("the trainer that started this server is gone")
            await over
        return over.result() if over.done() else ""
    finally:
        ticks.cancel()
        if over.done() and over.result():
            # the log first and the parent last, since this process ends with it
            for handler in logging.getLogger().handlers:
                handler.flush()
            for process in sorted(service.processes.values(), key=lambda process: process.pid == settings.parent):
                process.send(signal.SIGKILL)
        await service.close()
        await torchft.close()
        await server.stop()


def main() -> int:
    log_to_stderr("group server")

    async def until_eof(settings: Settings) -> str:
        """Runs until stdin is closed: the parent has the pipe's other end, which the kernel closes however the parent ends."""
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()

        def readable() -> None:
            if not os.read(0, 4096):
                loop.remove_reader(0)
                gone.set_result(None)

        loop.add_reader(0, readable)
        return await run(settings, gone, lambda line: print(line, flush=True))

    try:
        given = json.loads(sys.stdin.readline())
        access, times = given["access"], m.Timeouts(**given["times"])
        tls = access["tls"] and Tls(**{name: path and Path(path) for name, path in access["tls"].items()})
        settings = Settings(**{**given, "times": times, "access": Access(**{**access, "tls": tls})})
        if settings.parent:  # set if the parent's main thread started this process: see clients.GroupServerProcess
            die_with(settings.parent)
        return 1 if asyncio.run(until_eof(settings)) else 0
    except ValueError as error:
        print(f"group server: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
