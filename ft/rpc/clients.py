"""A rank's side of its replica group's server: the child process that rank 0 starts, a client with threads instead of an asyncio loop, and
the first contact with the lighthouse.

A call that is not answered in time raises TimeoutError, one that is refused RuntimeError. Neither counts as an answer "no".
"""

from __future__ import annotations

import json
import logging
import math
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from ft.children import unsignalled
from ft.protocol import messages as m
from ft.rpc import codec
from ft.rpc.access import Access, this_host
from ft.rpc.generated import pharos_pb2
from ft.rpc.lighthouse_link import channel
from ft.seam import GroupEnded

if TYPE_CHECKING:
    from ft.rpc.group_server import Settings

ROOT = Path(__file__).resolve().parents[2]
START_S = 30.0  # timeout of the server's launch
CONTACT_TRY_S, AGAIN_S = 5.0, 1.0  # timeout of one try of the first contact; pause before the next
MAX_LINES = 64  # lines for the dashboard that may be queued for the stream
ASK_S = 30.0  # timeout of one try of a quorum request
VOTE_S, VOTE_TRIES = 30.0, 10  # timeout of one try of a vote; tries without a sign that the group waits for others
MESSAGE_S = 3.0  # a Waits message counts for this long; they come each second (protocol/group.py)
LOG_AFTER_S = 10.0  # a wait is first logged after this time
LOG_EVERY_S = 60.0  # and then at this interval
GONE_S = 2.0  # after a call failed: time in which the stream shows that the server is gone
log = logging.getLogger("pharos.group")
_TIMED_OUT = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)


class SettingsRefused(RuntimeError):
    """The user must correct a setting: a repeated call would get the same answer."""


class NameTaken(SettingsRefused):
    """A different group has this name; it may be about to end."""


class Stale(RuntimeError):
    """A vote on a generation or attempt that is over in this group."""


class GroupServerProcess:
    """A group's server as a child of this process, the group's rank 0. Raises ChildProcessError if it cannot start. It ends when this
    process dies, by three means: the pipe to its stdin; if the main thread started it, the kernel's parent-death signal (sent when the
    *thread* that started the child ends, so no other thread may use it); and its watch of each rank's process, which begins with the rank's
    stream. A process that this one forks without exec, such as a DataLoader's worker, keeps the pipe open: then the other two are left."""

    def __init__(self, settings: Settings) -> None:
        main = threading.current_thread() is threading.main_thread()
        # A session of its own, with the usual signals blocked: the trainer answers Ctrl-C or SIGTERM for the group, with a Leave.
        with unsignalled():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ft.rpc.group_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,  # `-m` searches there first
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
                start_new_session=True,
            )
        self.pid = self._process.pid
        assert self._process.stdin and self._process.stdout
        given = asdict(settings) | {"parent": os.getpid() if main else 0}
        # abspath: the files of TLS may be relative to the working folder of this process
        self._process.stdin.write(json.dumps(given, default=os.path.abspath).encode() + b"\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:  # select() does not support descriptors above 1023
            selector.register(self._process.stdout, selectors.EVENT_READ)
            answered = bool(selector.select(START_S))
        if not answered:
            self._process.kill()
        if not answered or not (line := self._process.stdout.readline()):  # empty: it has ended
            code = self._process.wait()
            why = f"ended with exit code {code}" if answered else f"did not start in {START_S:g} s"
            raise ChildProcessError(f"the group server {why}; its output is on stderr")
        self.address = str(json.loads(line)["address"])

    def close(self) -> None:
        """Ends the server. The group's ranks must have left, or be gone. May be called twice."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class GroupClient:
    """A rank's connection to its group's server, at "http://host:port". Thread-safe. `last_waiting_for_others_at_s`: as in Seam, the time
    of the newest message that the whole group waits for others, or of the newest answer to a quorum request. `gone`: set when the server or
    group has ended."""

    def __init__(self, address: str, group_rank: int, access: Access | None = None) -> None:
        self.group_rank, self._access = group_rank, access or Access()
        self._channel = channel(address, self._access, aio=False)
        self._metadata = self._access.metadata()
        self._up: list[tuple[str, Any]] = []  # for the stream: (field of RankUp, message); field "": close it
        self._more = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.last_waiting_for_others_at_s, self.gone = -math.inf, threading.Event()
        self._waited_s, self._log_at_s = 0.0, LOG_AFTER_S  # newest reported wait; the wait that is logged next

    def ask_quorum(self, call: m.RankCall, within_s: float | None, name_free_s: float) -> m.Event | None:
        """Requests a quorum, and repeats the request until it is answered. Returns the answer; QuorumFailed after `within_s` (None: no
        limit) or a failed call; None if the server is gone, and the stream has the reason. NameTaken is retried for `name_free_s`. Raises
        SettingsRefused."""
        asked_s = time.monotonic()
        while True:
            left_s = math.inf if within_s is None else asked_s + within_s - time.monotonic()
            try:
                answer = self.quorum(call, max(0.01, min(left_s, ASK_S)))
                # the request of all the group's ranks was answered
                self.last_waiting_for_others_at_s = time.monotonic()
                return answer
            except TimeoutError as error:
                waited_s = time.monotonic() - asked_s
                if left_s <= ASK_S:
                    return m.QuorumFailed(f"none within {waited_s:g} s: {error}")
                if not self._waits_for_others:
                    log.info("no quorum for %.0f s: other ranks of this group have not requested one", waited_s)
            except SettingsRefused as error:
                # the group that has the name may be about to end
                if not isinstance(error, NameTaken) or time.monotonic() - asked_s >= name_free_s:
                    raise
                if self.gone.wait(GONE_S):
                    return None
            except RuntimeError as error:
                return None if self.gone.wait(GONE_S) else m.QuorumFailed(str(error))

    def outcome(self, vote: m.Vote) -> m.Outcome:
        """Casts a vote and returns the group's outcome. Without an answer the vote is cast again, without limit while the group waits for
        others. Raises GroupEnded if there is no outcome, in which case this rank must end."""
        tries = 0
        while tries < VOTE_TRIES:
            try:
                return self.vote(vote, VOTE_S)
            except TimeoutError:
                if self._waits_for_others:
                    continue
            except Stale as error:
                raise GroupEnded(f"the group has continued without this rank: {error}") from None
            except RuntimeError as error:
                raise GroupEnded(f"the group's server accepts no votes any more: {error}") from None
            tries += 1
            step = m.describe_step(vote.step)
            log.info("no outcome yet of the vote on %s of step %s", vote.kind, step)
        raise GroupEnded(
            f"no outcome of the vote on {vote.kind} of step {m.describe_step(vote.step)} in {VOTE_S * VOTE_TRIES:g} s"
        )

    @property
    def _waits_for_others(self) -> bool:
        return time.monotonic() - self.last_waiting_for_others_at_s <= MESSAGE_S

    def quorum(self, call: m.RankCall, timeout_s: float) -> m.QuorumResult | m.RestoreRequired | m.Released:
        """Requests a quorum once: waits for the requests of all ranks and for the lighthouse. Raises TimeoutError, RuntimeError."""
        reply = self._call("Quorum", codec.to_message(call), pharos_pb2.RankReply, timeout_s)
        if reply.WhichOneof("reply") == "restore":
            return m.RestoreRequired(reply.restore.settled)
        if reply.WhichOneof("reply") == "released":
            return m.Released()
        return codec.from_message(m.QuorumResult, reply.quorum)

    def vote(self, vote: m.Vote, timeout_s: float) -> m.Outcome:
        """Casts a vote once and waits for the group's outcome; the vote may be repeated. Raises TimeoutError, Stale, RuntimeError."""
        call = self._channel.unary_unary("/pharos.Group/CastVote")
        return codec.from_bytes(m.Outcome, answer_of(call, codec.to_message(vote), timeout_s, self._metadata))

    def checkpoint_metadata(self, group_rank: int, timeout_s: float) -> str:
        """Returns the address at which that rank of the server's group serves its state. Raises TimeoutError, RuntimeError."""
        ask = pharos_pb2.AskMetadata(group_rank=group_rank)
        return str(self._call("CheckpointMetadata", ask, pharos_pb2.Metadata, timeout_s).checkpoint_metadata)

    def leave(self, *, clean: bool, reason: str, finished: bool = False, timeout_s: float = 5.0) -> None:
        """Announces that the whole group leaves: then its ranks may close in any order. Raises TimeoutError, RuntimeError."""
        leave = pharos_pb2.Leave(clean=clean, reason=codec.shorten(reason, codec.MAX_REASON), finished=finished)
        self._call("Leave", leave, pharos_pb2.Done, timeout_s)

    def watch(
        self, on_notice: Callable[[m.Notice], None], on_end: Callable[[str], None], *, pid: int | None = None
    ) -> None:
        """Opens this rank's stream. From then on the group ends if the stream breaks, unless it has left. `on_end` is called once, with the
        reason, if the server is gone: then the rank must exit. Both are called in a separate thread, and must not raise. `pid`: process ID
        that is killed when the group ends, by default this process's; 0: none."""
        assert self._thread is None, "a rank has one stream"
        pid = os.getpid() if pid is None else pid
        self._send("hello", pharos_pb2.RankHello(group_rank=self.group_rank, pid=pid, host=this_host()))
        sent = iter(self._next_message, None)  # grpc reads it in a thread of its own
        stream = self._channel.stream_stream("/pharos.Group/Watch")(sent, metadata=self._metadata)

        def read() -> None:
            why = ""
            try:
                for data in stream:
                    why = self._on_message(data, on_notice) or why
                why = why or "the group's server closed the stream"
            except grpc.RpcError as error:
                why = why or f"the stream to the group's server broke: {error.details()}"
            if not self._closed:
                on_end(why)
            self.gone.set()

        self._thread = threading.Thread(target=read, name="group-watch", daemon=True)
        self._thread.start()

    def report(self, report: m.Report, **metrics: Any) -> None:
        """Sends a report to the group's server, for its heartbeats. `metrics`: fields of pharos.Report that only the dashboard shows."""
        message = codec.to_message(report)
        message.MergeFrom(pharos_pb2.Report(**metrics))
        self._send("report", message)

    def show_event(self, lane: str, step: int, text: str) -> None:
        """Sends an event for the dashboard's timeline. `lane`: one of codec.CLIENT_LANES. It may get lost."""
        self._send("timeline_event", codec.timeline_event_message(lane, step, text))

    def rejoin_under_new_id(self, quorum_id: int, reason: str) -> None:
        """Makes the group return under a new id, since it keeps the others waiting. All ranks may call this; the first call counts."""
        self._send("rejoin", pharos_pb2.RejoinUnderNewId(quorum_id=quorum_id, reason=reason))

    def want_to_leave(self) -> None:
        """Reports that this rank was asked to leave: if its group waits for others, the wait ends."""
        self._send("wants_to_leave", pharos_pb2.Done())

    def close(self) -> None:
        """Closes the stream and the channel. May be called twice."""
        self._closed = True
        self._send("", None)
        if self._thread:
            self._thread.join(timeout=5)
        self._channel.close()

    def _send(self, field: str, message: Any) -> None:
        """Queues a message. The queue is bounded: it keeps the newest report and the first MAX_LINES events for the dashboard."""
        with self._more:
            if field == "timeline_event" and sum(other == field for other, _ in self._up) >= MAX_LINES:
                return
            if field == "report":
                self._up = [other for other in self._up if other[0] != field]
            self._up.append((field, message))
            self._more.notify()

    def _next_message(self) -> bytes | None:
        with self._more:
            self._more.wait_for(lambda: self._up)
            field, message = self._up.pop(0)
        return pharos_pb2.RankUp(**{field: message}).SerializeToString() if field else None

    def _on_message(self, data: bytes, on_notice: Callable[[m.Notice], None]) -> str:
        """Handles a message of the stream. Returns the reason why the group has ended; empty if it has not."""
        try:
            down = codec.parse(pharos_pb2.RankDown, data)
            which = down.WhichOneof("down")
            if which == "notice":
                on_notice(codec.notice_from(down.notice))
            elif which == "waits":
                self.on_waits(codec.from_message(m.Waits, down.waits))
        except ValueError as error:  # a notice of an unknown kind: the next quorum has its consequences
            log.warning("a message of the group's server is ignored: %s", error)
            return ""
        return str(down.ended.reason)

    def on_waits(self, waits: m.Waits) -> None:
        """Records that the group waits for others, as its server reports each second. Rank 0 logs it every LOG_EVERY_S."""
        self.last_waiting_for_others_at_s = time.monotonic()
        if waits.waited_s < self._waited_s:
            self._log_at_s = LOG_AFTER_S
        self._waited_s = waits.waited_s
        if self.group_rank == 0 and waits.waited_s >= self._log_at_s:
            self._log_at_s = waits.waited_s - waits.waited_s % LOG_EVERY_S + LOG_EVERY_S
            log.info("has waited %.0f s: %s", waits.waited_s, waits.reason)

    def _call(self, method: str, request: Any, reply_type: Any, timeout_s: float) -> Any:
        call = self._channel.unary_unary(f"/pharos.Group/{method}")
        return codec.parse(reply_type, answer_of(call, request, timeout_s, self._metadata))


def is_torchft_lighthouse(lighthouse: str, access: Access, patience_s: float = 60.0) -> bool:
    """Returns True if the lighthouse implements torchft's RPCs only, False for Pharos. Retries until the lighthouse answers, after one
    warning. Raises ValueError if it refuses the token, ConnectionError after `patience_s`."""
    until_s, warned = time.monotonic() + patience_s, False
    with closing(channel(lighthouse, access, aio=False)) as connection:
        call = connection.unary_unary("/pharos.Lighthouse/Quorum")
        while True:
            try:  # a request without a member is refused, and changes nothing
                call(b"", timeout=CONTACT_TRY_S, metadata=access.metadata())
                return False
            except grpc.RpcError as error:
                code, why = error.code(), error.details()
            if code is grpc.StatusCode.UNAUTHENTICATED:
                given = "has a different token" if access.token else "requires a token, and it is not set"
                raise ValueError(f"PHAROS_TOKEN: the lighthouse at {lighthouse} {given}")
            if code not in (grpc.StatusCode.UNAVAILABLE, *_TIMED_OUT):
                return bool(code is grpc.StatusCode.UNIMPLEMENTED)
            where = f"no lighthouse answers at TORCHFT_LIGHTHOUSE = {lighthouse}"
            if time.monotonic() >= until_s:
                raise ConnectionError(f"{where} within {patience_s:g} s: {why}")
            if not warned:
                warned = True
                log.warning("%s; waiting %g s for it: %s", where, patience_s, why)
            time.sleep(min(AGAIN_S, patience_s))


def answer_of(call: Any, request: Any, timeout_s: float, metadata: Any) -> bytes:
    """Makes a call and returns its answer. Raises TimeoutError, SettingsRefused, NameTaken, Stale, RuntimeError."""
    data = request.SerializeToString()
    try:
        return bytes(call(data, timeout=timeout_s, metadata=metadata))
    except ValueError as error:  # another thread has closed the channel
        raise RuntimeError(str(error)) from None
    except grpc.RpcError as error:
        kind, why = _KINDS.get(error.code(), RuntimeError), str(error.details())
        if error.code() in _TIMED_OUT:
            raise TimeoutError(why) from None
        raise kind(why if issubclass(kind, SettingsRefused) else f"{error.code().name}: {why}") from None


_KINDS: dict[grpc.StatusCode, type[RuntimeError]] = {
    grpc.StatusCode.ABORTED: Stale,
    grpc.StatusCode.INVALID_ARGUMENT: SettingsRefused,
    grpc.StatusCode.ALREADY_EXISTS: NameTaken,
}
