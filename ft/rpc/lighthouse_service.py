"""The lighthouse's gRPC services, which drive the state machine of ft.protocol.lighthouse.

    torchft.LighthouseService   Quorum Heartbeat                           clients of torchft
    pharos.Lighthouse           Quorum Watch Leave Evict TakeOver          Pharos group servers

lighthouse_main.py gives them a port and a state file. No torch here.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from ft.protocol import messages as m
from ft.protocol.lighthouse import LighthouseConfig, LighthouseMachine
from ft.protocol.roster import takeover_order_s
from ft.protocol.rules import MAX_STEP, request_problem
from ft.rpc import codec, state_file
from ft.rpc.driver import Driver, Observer, now_s
from ft.rpc.generated import pharos_pb2, torchft_pb2
from ft.rpc.serving import SWEEP_S, Outbox, Pending, PendingCalls, refused, stream, unary

MAX_DATA = 64 << 10  # characters of a member's `data`, which goes to all other members
MAX_HANDLES = 1 << 20  # characters of a member's handles, plus their number
MAX_WAITING = 64 << 20  # bytes of all waiting requests; the quorum of more groups would be too large to send
MAX_KNOWN = MAX_STEP // 2  # highest quorum id that is accepted from a group; as many ids are left to issue
REFUSALS_KEPT = 4096  # ids whose last refusal is remembered, for the log
log = logging.getLogger("pharos.lighthouse")
_NUMBER = re.compile(r"[\d.]+")


class DashboardListener(Protocol):
    """Listener of the dashboard (ft/dashboard). Called on the loop for each event of each group, so it must only record."""

    def on_event(self, event: m.Event, out: m.Out) -> None: ...  # at each tick, leave, and event that had an effect
    def reported(self, report: Any) -> None: ...  # report: a pharos_pb2.Report of a connected group
    def on_timeline_event(self, replica_id: str, event: Any) -> None: ...  # a pharos_pb2.TimelineEvent
    def end(self) -> None: ...  # the last call


class LighthouseService:
    """Drives one lighthouse state machine, on one asyncio loop."""

    def __init__(
        self,
        config: LighthouseConfig,
        *,
        state_writer: state_file.StateFileWriter | None = None,
        saved: m.PersistentState | None = None,
        recover: bool = False,
        lower_limits: bool = False,
        observer: Observer | None = None,
    ) -> None:
        epoch = uuid.uuid4().hex[:12]
        self.machine = LighthouseMachine(
            config, now_s(), epoch=epoch, saved=saved, recover=recover, lower_limits=lower_limits
        )
        self.config, self.state_writer, self.max_waiting = self.machine.config, state_writer, MAX_WAITING
        if config.limits != (limits := self.config.limits):
            log.warning("--lower_limits is not given, so the job keeps its limits: %s, not %s", limits, config.limits)
        self.streams: dict[str, Outbox] = {}  # by replica_id
        self.reports: dict[str, Any] = {}  # replica_id -> newest pharos_pb2.Report of its open stream
        self.issued = self.lost = self.refused = 0  # counts, for /metrics; refused: also calls without the token
        self.issued_at = 0.0  # time of the newest quorum, in seconds since 1970
        self.dashboard: DashboardListener | None = None
        self.stops = False  # True: the server stops, so the end of a stream does not mean that its group is lost
        self._pending = PendingCalls(lambda i: self.driver.feed(m.CallCancelled(i)), swept=config.tick_s <= SWEEP_S)
        self._refusals: dict[str, str] = {}  # replica_id -> reason of its last refusal
        self._answered: m.Quorum | None = None  # newest quorum that was answered
        self._serialized: dict[str, bytes] = {}  # that quorum as serialised answers, by kind of answer (see _serialize)
        self._static_quorum = codec.StaticQuorum()  # the static part of that quorum
        self._observer, self._logged_reason, self._logged_id, self._lost_in = observer, "", 0, 0
        self._limits = {"times": codec.to_message(self.config.times), "limits": codec.to_message(self.config.limits)}
        # A group holds back commits after takeover_s / 2 without an answered heartbeat: here four answers in a row may be lost. After
        # heartbeat_timeout_s a waiting group reports the lighthouse as silent.
        times = self.config.times
        self._answer_every_s = min((times.takeover_s or 30.0) / 12, times.heartbeat_timeout_s / 2)
        handlers: dict[type[m.Effect], Callable[[Any], asyncio.Future[None] | None]] = {
            m.Persist: lambda e: self.state_writer.schedule_write(e.saved) if self.state_writer else None,
            m.Answer: self._answer,
            m.Refuse: self._refuse,
            m.MustRestore: self._must_restore,
            m.Notify: self._notify,
        }
        self.driver = Driver(
            self.machine, handlers, tick_s=config.tick_s, observer=self._log, before_tick=self._before_tick
        )
        self.routes = {
            "/torchft.LighthouseService/Quorum": unary(self._torchft_quorum),
            "/torchft.LighthouseService/Heartbeat": unary(self._torchft_heartbeat),
            "/pharos.Lighthouse/Quorum": unary(self._quorum),
            "/pharos.Lighthouse/Watch": stream(self._watch),
            "/pharos.Lighthouse/Leave": unary(partial(self._on_event, m.Leave)),
            "/pharos.Lighthouse/Evict": unary(partial(self._on_event, m.Evict)),
            "/pharos.Lighthouse/TakeOver": unary(partial(self._on_event, m.TakeOver)),
        }

    def _torchft_quorum(self, data: bytes, context: Any) -> Awaitable[bytes]:
        request = codec.parse(torchft_pb2.LighthouseQuorumRequest, data)
        if not request.HasField("requester"):
            raise ValueError("missing requester")
        return self.ask(codec.call_from_torchft(request.requester), Pending(len(data), None), context)

    async def _torchft_heartbeat(self, data: bytes, context: Any) -> bytes:
        replica_id = codec.parse(torchft_pb2.LighthouseHeartbeatRequest, data).replica_id
        if replica_id not in self.machine.roster.peers:  # ten a second of each id: known ids have been checked
            _check(m.Call(m.Member(replica_id), "torchft"))
        self._check_kind("torchft")
        self.driver.feed(m.Beat(replica_id, "torchft"))
        return b""

    def _quorum(self, data: bytes, context: Any) -> Awaitable[bytes]:
        request = codec.parse(pharos_pb2.QuorumRequest, data)
        return self.ask(codec.from_message(m.Call, request.call), Pending(len(data), request.static_quorum_id))

    def ask(self, call: m.Call, pending: Pending, context: Any = None) -> Awaitable[bytes]:
        """Feeds a quorum request, and waits for the answer. `context`: a torchft RPC's. Raises ValueError, CallRefused."""
        # Checked before it waits: a refusal by the machine answers all waiting requests of that id, also those of its rightful group.
        _check(call)
        self._check_id(max(call.known, call.member.commit_quorum_id))
        self._check_kind(call.kind)
        if self._pending.size + pending.size > self.max_waiting:
            raise refused("RESOURCE_EXHAUSTED", f"calls of {self._pending.size} bytes in all are waiting already")
        replica_id = call.member.replica_id
        if replica_id in self.streams:
            self.streams[replica_id].wait_reason = ""  # that was the reason of an earlier request's wait
        return self._pending.wait(replica_id, replica_id, pending, partial(self.driver.feed, call), context)

    def _check_kind(self, kind: m.Kind) -> None:
        if problem := self.machine.kind_problem(kind):
            self.refused += 1
            raise refused(*problem)

    def _check_id(self, quorum_id: int) -> None:
        """Raises ValueError for an id so high that no ids would be left: new ids are above all that groups know."""
        if quorum_id > MAX_KNOWN and quorum_id > self._newest_id:
            raise ValueError(f"quorum {quorum_id}: a lighthouse accepts ids up to {MAX_KNOWN}")

    async def _on_event(self, event_type: type[m.Event], data: bytes, context: Any) -> bytes:
        event = codec.from_bytes(event_type, data)
        log.info("%s", event)
        self.driver.feed(event)
        if isinstance(event, m.TakeOver):
            text = "an operator allows a takeover, for %g s and as long as a group waits"
            log.warning(text, takeover_order_s(self.config.times.takeover_s))
        return b""

    async def _watch(self, outbox: Outbox) -> None:
        hello = codec.parse(pharos_pb2.Up, await outbox.read_hello()).hello
        replica_id = hello.replica_id
        _check(m.Call(m.Member(replica_id), known=hello.quorum_id, epoch=hello.epoch))
        _check_step(hello.settled)
        self._check_id(hello.quorum_id)
        self._check_kind("pharos")
        old, self.streams[replica_id] = self.streams.get(replica_id), outbox
        if old:
            old.end()
        try:
            if self._must_send_quorum(hello):
                outbox.send(pharos_pb2.Down(send_quorum=True).SerializeToString())
            else:
                self._opened(hello)
            while (data := await outbox.read()) is not None:
                self._on_message(hello, codec.parse(pharos_pb2.Up, data), outbox)
        finally:
            if self.streams.get(replica_id) is outbox:
                del self.streams[replica_id]
                self.reports.pop(replica_id, None)
                if not self.stops:
                    self.driver.feed(m.StreamClosed(replica_id))

    def _opened(self, hello: pharos_pb2.Hello, known: m.Quorum | None = None) -> None:
        """Feeds StreamOpened. `known`: the quorum of the hello, if the machine does not know it; else its id is enough."""
        known = known or (m.Quorum(hello.quorum_id, (), epoch=hello.epoch) if hello.quorum_id else None)
        before = self.machine.quorum
        self.driver.feed(m.StreamOpened(hello.replica_id, known, hello.settled))
        if known is None or before is None or known.epoch in ("", before.epoch):
            return
        settled = m.describe_step(hello.settled)
        reports = f"{hello.replica_id} reports quorum {known.quorum_id} of epoch {known.epoch}, settled step {settled}"
        cause = "this lighthouse was started without the state file of a running job"
        if self.machine.quorum is not before:
            log.warning(
                "%s: %s, which continues; quorum %d, formed since then, is over", reports, cause, before.quorum_id
            )
        else:
            goes_on = f"it continues with quorum {before.quorum_id} of epoch {before.epoch}"
            log.error("%s: %s; %s. Members whose state is further wait, and log the remedy", reports, cause, goes_on)

    def _must_send_quorum(self, hello: pharos_pb2.Hello) -> bool:
        """True if the machine does not know the quorum of the hello, and may adopt it."""
        newest = self.machine.quorum
        is_foreign = newest is not None and hello.epoch not in ("", newest.epoch)
        return hello.quorum_id > self._newest_id or (hello.quorum_id > 0 and is_foreign)

    def _on_message(self, hello: pharos_pb2.Hello, up: pharos_pb2.Up, outbox: Outbox) -> None:
        which = up.WhichOneof("up")
        if which == "report":
            up.report.replica_id = hello.replica_id
            report = codec.report_from(up.report)
            self.reports[hello.replica_id] = up.report
            self.driver.feed(report)
            self._show(lambda dashboard: dashboard.reported(up.report))
            if hello.replica_id in self._pending:
                peer = self.machine.roster.peers.get(hello.replica_id)
                why = self.machine.roster.why_it_sits_out(hello.replica_id) or self.machine.reason
                if self.state_writer and peer and peer.call is None:
                    trouble = f": {self.state_writer.trouble}" if self.state_writer.trouble else ""
                    why = (
                        f"the quorum has formed; its answer waits until the lighthouse's state file is written{trouble}"
                    )
                if outbox.wait_reason != why:
                    outbox.wait_reason = why
                    outbox.send(pharos_pb2.Down(waits=why[: codec.MAX_LINE]).SerializeToString())
            # a group whose place was taken must not commit on an answer that overtakes its refusal, which may wait for the disk
            known = hello.replica_id in self.machine.roster.peers
            if known and not 0 <= up.report.sent_s - outbox.answered_s < self._answer_every_s:
                outbox.answered_s = up.report.sent_s
                outbox.send(pharos_pb2.Down(beat_answered=up.report.sent_s).SerializeToString())
        elif which == "quorum":
            new = up.quorum.quorum_id == hello.quorum_id and self._must_send_quorum(hello)
            self._opened(hello, codec.quorum_from(up.quorum) if new else None)
        elif which == "timeline_event":
            timeline_event = codec.check_timeline_event(up.timeline_event)
            self._show(lambda dashboard: dashboard.on_timeline_event(hello.replica_id, timeline_event))
        else:
            raise ValueError("a message after the hello must be a report, a quorum or a timeline event")

    def order(self, replica_id: str, kind: str, reason: str) -> bool:
        """Sends an operator's order (`kind`: one of codec.ORDERS) down the group's stream. Returns False if it has no stream."""
        order = pharos_pb2.Order(kind=kind, reason=reason)
        return self._send(replica_id, pharos_pb2.Down(order=order).SerializeToString())

    def _send(self, replica_id: str, message: bytes) -> bool:
        """Sends a message down the group's stream. Returns False if it has no stream."""
        if outbox := self.streams.get(replica_id):
            outbox.send(message)
        return outbox is not None

    @property
    def waiting_ids(self) -> list[str]:
        return sorted(self._pending)

    @property
    def _newest_id(self) -> int:
        return self.machine.quorum.quorum_id if self.machine.quorum else 0

    def _before_tick(self) -> None:
        self._pending.expire()
        if self.state_writer:
            self.state_writer.check()

    def _answer(self, effect: m.Answer) -> None:
        if effect.quorum is not self._answered:
            self.issued_at, self._answered, self._serialized = time.time(), effect.quorum, {}
            if self.machine.roster.kind == "pharos":  # torchft's answer has none, and it costs 1 % of a quorum
                self._static_quorum = codec.StaticQuorum.of(effect.quorum, self._static_quorum)
        # by the static_quorum_id that the caller has; None: a caller of torchft's
        kinds = {None: "torchft", self._static_quorum.id: "short"}
        for replica_id in effect.replica_ids:
            calls = self._pending.pop(replica_id, [])
            for pending in calls:
                pending.give(self._serialize(kinds.get(pending.static_quorum_id, "full")))
            if not calls and replica_id in self.streams:
                self._send(replica_id, self._serialize("down"))

    def _serialize(self, name: str) -> bytes:
        """Returns the newest quorum as an answer, made once for all: "torchft", "full", "short" (no static part), "down" (stream)."""
        quorum = self._answered
        assert quorum is not None
        if name not in self._serialized:
            if name == "torchft":
                reply: Any = torchft_pb2.LighthouseQuorumResponse(quorum=codec.torchft_quorum(quorum, self.issued_at))
            elif name == "short" and (dynamic := codec.dynamic_part(quorum)):
                reply = pharos_pb2.QuorumReply(dynamic=dynamic, **self._limits)
            else:
                reply = pharos_pb2.QuorumReply(quorum=codec.to_message(quorum), **self._limits)
                reply = pharos_pb2.Down(answer=reply) if name == "down" else reply
            self._serialized[name] = reply.SerializeToString()
        return self._serialized[name]

    def on_denied(self) -> None:
        self.refused += 1

    def _refuse(self, effect: m.Refuse) -> None:
        self.refused += effect.code != "LOST"  # a lost group that returns, under a new id
        calls = self._pending.pop(effect.replica_id, [])
        for pending in calls:
            pending.fail(refused(effect.code, effect.reason))
        if not calls:
            reason = codec.shorten(effect.reason, codec.MAX_REASON)
            down = pharos_pb2.Refused(replica_id=effect.replica_id, code=effect.code, reason=reason)
            self._send(effect.replica_id, pharos_pb2.Down(refused=down).SerializeToString())

    def _must_restore(self, effect: m.MustRestore) -> None:
        reply = pharos_pb2.QuorumReply(restore=pharos_pb2.Restore(settled=effect.settled), **self._limits)
        for pending in [one for replica_id in effect.replica_ids for one in self._pending.pop(replica_id, [])]:
            pending.give(reply.SerializeToString())

    def _notify(self, effect: m.Notify) -> None:
        notice = effect.notice
        # not one that is repeated to a reopened stream
        if isinstance(notice, m.MemberLost) and notice.quorum_id != self._lost_in:
            self.lost, self._lost_in = self.lost + 1, notice.quorum_id
        message = pharos_pb2.Down(notice=codec.notice_message(effect.notice)).SerializeToString()
        for replica_id in effect.replica_ids:
            self._send(replica_id, message)

    def _log(self, now_s: float, event: m.Event, out: m.Out) -> None:
        """Logs effects, and at ticks a reason if more than its numbers has changed. Then calls dashboard and observer."""
        for effect in out.effects:
            if isinstance(effect, m.Answer):
                quorum, self._logged_reason = effect.quorum, out.reason
                if quorum.quorum_id != self._logged_id:  # else a repeated request
                    self.issued, self._logged_id = self.issued + 1, quorum.quorum_id
                    what = quorum.quorum_id, len(quorum.members), m.describe_step(quorum.reference[0]), out.reason
                    log.info("quorum %d of %d groups, step %s: %s", *what)
            elif isinstance(effect, m.Refuse):  # logged once, though a former member repeats its request without end
                text = _NUMBER.sub("#", effect.reason)
                if self._refusals.get(effect.replica_id) != text:
                    self._refusals[effect.replica_id] = text
                    log.warning("%s is refused (%s): %s", effect.replica_id, effect.code, effect.reason)
                while len(self._refusals) > REFUSALS_KEPT:
                    del self._refusals[next(iter(self._refusals))]
            elif isinstance(effect, m.Notify):
                log.info("to %d groups: %s", len(effect.replica_ids), effect.notice)
        if isinstance(event, m.Tick) and _NUMBER.sub("#", out.reason) != _NUMBER.sub("#", self._logged_reason):
            self._logged_reason = out.reason
            log.info("%s", out.reason)
        if self.dashboard and (out.effects or isinstance(event, m.Tick | m.Leave)):
            self._show(lambda dashboard: dashboard.on_event(event, out))
        if self._observer:
            self._observer(now_s, event, out)

    def _show(self, call: Callable[[DashboardListener], None]) -> None:
        """Calls the dashboard's listener, if there is one. An error in it switches the dashboard off and does not affect the job."""
        if dashboard := self.dashboard:
            try:
                call(dashboard)
            except Exception:  # of any kind: the next group's request must be answered
                self.dashboard = None
                log.exception("an error in the dashboard, which is switched off")
                dashboard.end()


def _check(call: m.Call) -> None:
    """Raises ValueError for a quorum request with impossible or too large values."""
    member = call.member
    if problem := request_problem(call):
        raise ValueError(problem)
    handles = member.reconfigure_handles
    if len(member.data) > MAX_DATA or (handles and sum(map(len, handles)) + len(handles) > MAX_HANDLES):
        raise ValueError(f"data of more than {MAX_DATA} or handles of more than {MAX_HANDLES} characters")
    if len(call.blame) > codec.MAX_NAMED or len(call.fingerprint) > codec.MAX_DIGESTS or call.known < 0:
        raise ValueError(f"legal is up to {codec.MAX_NAMED} blamed members, {codec.MAX_DIGESTS} digests, known >= 0")
    _check_step(member.assigned, member.restored or 0, member.commit_failures)


def _check_step(*numbers: int) -> None:
    if min(numbers) < m.VOID or max(numbers) > MAX_STEP:
        raise ValueError(f"a step or count of {max(numbers, key=abs)}: legal is {m.VOID} to {MAX_STEP}")
