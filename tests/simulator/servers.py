"""Simulates the processes of the lighthouse and of group servers: thin drivers of the real state machines, like those of ft/rpc."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ft.protocol import messages as m
from ft.protocol.group import GroupConfig
from ft.protocol.step import StepConfig
from tests.simulator.inside import Inside
from tests.simulator.network import Call, End, Service
from tests.simulator.ranks import RankNode
from tests.simulator.trainer import OPTIMIZER_S

if TYPE_CHECKING:
    from tests.simulator.cluster import Cluster

LIGHTHOUSE = "lighthouse"
LOOK_S = 5.0  # as in ft/rpc/state_file.py
KEEPALIVE_S = 15.0  # of a connection to the lighthouse


class LighthouseNode:
    """A process of the lighthouse. Its state file is `cluster.state_file`, which outlives it."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.world, self.network = cluster, cluster.world, cluster.network
        host = f"{LIGHTHOUSE}.{cluster.lighthouse_moves}"
        self.process = cluster.new_process(f"lighthouse.{number}", host, LIGHTHOUSE)
        self.number = number
        self.config = cluster.lighthouse_config
        self.knows_token = not cluster.wrong_token  # else it refuses all
        file = cluster.state_file and asdict(cluster.state_file)  # read anew, as from a disk
        self.machine = cluster.machines.lighthouse(
            self.config,
            self.process.now_s(self.world),
            epoch=f"e{number}",
            saved=m.PersistentState.from_dict(file) if file else None,
            recover=cluster.truth.forgetful,
        )
        self.disk_s = 0.0  # until when its disk takes nothing
        self._looks_s = self.world.now_s + LOOK_S  # next, at whose the state file is
        self._unwritten: tuple[m.Effect, ...] = ()  # effects that wait for it
        self._said: dict[str, str] = {}  # replica_id -> reason of its wait that was sent to it last
        self.dies_writing = False  # a fault: the next write is the last thing it does
        self._waiting: dict[str, list[Call]] = {}
        self._streams: dict[str, End] = {}
        # when those that have called, or were members, were last heard on their stream
        self._heard_s: dict[str, float] = {}
        self._told_s: dict[str, float] = {}  # when a lost id was first told that it is
        self._members: tuple[str, ...] = ()
        self._left: set[str] = set()  # on purpose
        self._do: dict[type[m.Effect], Callable[[Any], None]] = {
            m.Persist: self._persist,
            m.Answer: self._answer,
            m.Refuse: self._refuse,
            m.MustRestore: self._must_restore,
            m.Notify: self._notify,
        }

    def start(self) -> None:
        self.network.listen(LIGHTHOUSE, Service(self.process, self._called, self._opened))
        self.process.at_death.append(lambda: self.network.forget(self.process))
        self._tick()

    def feed(self, event: m.Event) -> None:
        out = self.machine.handle(event, self.process.now_s(self.world))
        self.cluster.saw(self.process.name, event, out)
        for effect in out.effects:
            self._decided(effect)
        effects = deque(out.effects)
        while effects and self.process.alive:  # it may die between two of them
            effect = effects.popleft()
            # Nothing overtakes what waits for the state file; without it no quorum is answered.
            if self._unwritten or (isinstance(effect, m.Persist) and self._waits_for_disk(effect.saved)):
                self._unwritten += (effect, *effects)
                return
            self._do[type(effect)](effect)

    def _waits_for_disk(self, saved: m.PersistentState) -> bool:
        """True for a state that a new quorum must wait for while the disk takes nothing. The job's progress may be written later."""
        known = self.cluster.state_file
        same = known is not None and known.quorum and saved.quorum and known.quorum.quorum_id == saved.quorum.quorum_id
        return self.disk_s > self.world.now_s and not same

    def _written(self) -> None:
        """Carries out the effects that waited for the disk, which works again."""
        unwritten, self._unwritten = self._unwritten, ()
        self.world.seen["lighthouse: a quorum waited for the disk"] += 1
        for effect in unwritten:
            if self.process.alive:
                self._do[type(effect)](effect)

    def _tick(self) -> None:
        """Twice through the queue, so that what arrived during a stop is handled before the tick that ends it."""
        self.world.after(0.0, self.process, self.feed, m.Tick())
        self.world.after(self.config.tick_s, self.process, self._tick)
        if self._unwritten and self.disk_s <= self.world.now_s:
            self._written()
        if self.world.now_s >= self._looks_s:
            self._looks_s = self.world.now_s + LOOK_S
            self._is_ours()
        if self._waiting:
            self._say_why()

    @property
    def hindered(self) -> bool:
        """Returns whether it can issue no quorum, or refuses everybody."""
        return bool(self._unwritten) or not self.knows_token or self.config.times != self.cluster.times

    def _say_why(self) -> None:
        """Sends its reason to each waiting group, when more than a number in it has changed."""
        for replica_id in self._waiting:
            why = self.machine.roster.why_it_sits_out(replica_id) or self.machine.reason
            said = self._said.get(replica_id, "")
            if replica_id in self._streams and said[:40] != why[:40]:
                self._said[replica_id] = why
                self._streams[replica_id].send(m.LighthouseWaits(why))

    def _called(self, call: Call) -> None:
        event = call.request
        if not self.knows_token and isinstance(event, m.Call):
            call.answer(m.LighthouseRefused(event.member.replica_id, "FAILED_PRECONDITION", "another token"))
            return
        if isinstance(event, m.Call):
            replica_id = event.member.replica_id
            self._waiting.setdefault(replica_id, []).append(call)
            self._heard_s[replica_id] = self.world.now_s
            call.at_cancel = lambda: self._cancelled(replica_id, call)
        else:
            call.answer(True)
            self._heard_s.pop(event.replica_id, None)  # it leaves
            if event.clean:
                self._left.add(event.replica_id)
        self.feed(event)

    def _cancelled(self, replica_id: str, call: Call) -> None:
        calls = self._waiting.get(replica_id, [])
        if call in calls:
            calls.remove(call)
            if not calls:
                del self._waiting[replica_id]
                self.feed(m.CallCancelled(replica_id))

    def _opened(self, hello: m.StreamOpened, end: End) -> None:
        replica_id = hello.replica_id
        if not self.knows_token:
            end.close()
            return
        old = self._streams.get(replica_id)
        self._streams[replica_id] = end
        end.message = lambda message: self._heard(end, *message)
        end.closed = lambda: self._stream_closed(replica_id, end)
        if old is not None:
            old.close()
        self.feed(hello)

    def _heard(self, end: End, sent_s: float, report: m.Report) -> None:
        if report.replica_id in self._heard_s:
            self._heard_s[report.replica_id] = self.world.now_s
        self.feed(report)
        end.send(m.BeatAnswered(sent_s))

    def _stream_closed(self, replica_id: str, end: End) -> None:
        if self._streams.get(replica_id) is end:
            del self._streams[replica_id]
            self.feed(m.StreamClosed(replica_id))

    def _counts(self, replica_id: str) -> bool:
        """Returns whether the group on this stream counts as present. A group that was told that it is lost has two beats to return,
        from the first notice on, whether it beats on or not; one that all others waited for counts as dead, though its server beats."""
        heard_s = self._heard_s.get(replica_id, -math.inf)
        why = self.machine.roster.lost.get(replica_id)
        if why is None:
            return heard_s > self.world.now_s - 3.0
        heard_s = min(heard_s, self._told_s.get(replica_id, math.inf))
        beat_s = self.machine.config.times.beat_s
        return heard_s > self.world.now_s - 2 * beat_s and not why.startswith(("others waited", "the others continued"))

    def _decided(self, effect: m.Effect) -> None:
        """Checks a decision when it is made: a disk that takes nothing keeps it, and a refusal behind it, from those whom they are for."""
        if isinstance(effect, m.Refuse) and effect.code == "LOST":
            self._told_s.setdefault(effect.replica_id, self.world.now_s)
        # no old answer again
        if isinstance(effect, m.Answer) and effect.replica_ids == effect.quorum.ids != self._members:
            heard = {i for i in self._streams if self._counts(i)}
            asked = {*effect.quorum.ids, *self._waiting}
            heard -= self.machine.roster.sitting.keys()
            before = tuple(i for i in self._members if i not in self._left)
            self.cluster.truth.majority(effect.quorum.ids, before, asked, heard)
            self._members = effect.quorum.ids

    # -- effects ----------------------------------------------------------------------------------------------------

    def _is_ours(self) -> bool:
        """Returns whether this lighthouse still owns the state file; if not, ends it."""
        if self.cluster.state_owner != self.number:
            self.world.seen["lighthouse found its state file taken over"] += 1
            self.world.kill(self.process)
        return self.process.alive

    def _persist(self, effect: m.Persist) -> None:
        if not self._is_ours():
            return
        self.cluster.state_file = effect.saved
        if self.dies_writing:
            self.world.seen["lighthouse died between writing and answering"] += 1
            self.world.kill(self.process)

    def _answer(self, effect: m.Answer) -> None:
        late = self.disk_s > 0.0  # a group that listened when it was decided may be gone
        self.cluster.truth.issued(
            effect.quorum, effect.replica_ids, {*self._waiting, *self._streams, *(effect.replica_ids if late else ())}
        )
        answer = m.LighthouseAnswered(effect.quorum, self.config.times)
        for replica_id in effect.replica_ids:
            if not self._reply(replica_id, answer) and replica_id in self._streams:
                self._streams[replica_id].send(answer)

    def _refuse(self, effect: m.Refuse) -> None:
        if effect.code == "ALREADY_EXISTS":
            self._heard_s.pop(effect.replica_id, None)  # another group has its name: it counts from its next request on
        refusal = m.LighthouseRefused(effect.replica_id, effect.code, effect.reason)
        if not self._reply(effect.replica_id, refusal) and effect.replica_id in self._streams:
            self._streams[effect.replica_id].send(refusal)

    def _must_restore(self, effect: m.MustRestore) -> None:
        for replica_id in effect.replica_ids:
            self._reply(replica_id, m.LighthouseRequiresRestore(effect.settled))

    def _notify(self, effect: m.Notify) -> None:
        for replica_id in effect.replica_ids:
            if replica_id in self._streams:
                self._streams[replica_id].send(effect.notice)

    def _reply(self, replica_id: str, reply: m.Event) -> bool:
        calls = self._waiting.pop(replica_id, [])
        for call in calls:
            call.answer(reply)
        return bool(calls)


class GroupNode:
    """An incarnation of a group: its server, its ranks, and the launcher that restarts it."""

    def __init__(self, cluster: Cluster, name: str, number: int, site: str = "", *, fingerprint: str = "") -> None:
        """site: where it runs, if not where its name always did. fingerprint: what it is said to train, if not what the job does."""
        self.cluster, self.world, self.network, self.truth = cluster, cluster.world, cluster.network, cluster.truth
        self.name, self.site, self.fingerprint = name, site or name, fingerprint
        self.process = cluster.new_process(f"{name}.{number}", self.site, self.site)
        self.address = f"http://{self.process.name}"
        world_size = cluster.setting.world_size
        config = GroupConfig(
            replica_id=f"{name}:{number}",
            world_size=world_size,
            address=self.address,
            store_address=f"{self.process.name}:1",
            times=cluster.times,
        )
        self.machine = cluster.machines.group(config, self.process.now_s(self.world))
        self.slow = 1.0
        self.ended = False
        self.left = False
        self.wish = False  # a rank was asked to leave
        self.stuck = False  # its processes cannot be killed
        self.harmed = False  # by a fault of its own: it may end of it
        self.nan_attempts = 0
        self._departed = 0
        self._awaits_s: float | None = None  # since when all its ranks have been in the sums
        self._answered_s = self.world.now_s  # the last beat
        self.compute_s = cluster.dice.between(0.9, 1.1)
        self._quorum: m.Quorum | None = None
        self._stream: End | None = None
        self._stream_id = ""
        self._asked = 0
        # by (group_rank, vote_key), or (group_rank, None) for a quorum
        self._waiting: dict[tuple[int, m.VoteKey | None], list[Call]] = {}
        self._rank_streams: dict[int, End] = {}
        self.inside = Inside(self.world, world_size)
        self.unreadable = False  # the checkpoint that it goes back to
        self.says: dict[int, tuple[bool, bool]] = {}  # on a commit, of each rank: yes, and a change
        self.agreed: dict[m.VoteKey, tuple[bool, bool]] = {}  # the same of all, of the newest two
        self.told: dict[m.VoteKey, bool] = {}  # rank 0: the server says yes
        self.able = True  # to use what it has computed
        steps = [StepConfig(group_rank=rank, restores=True, **cluster.setting.step) for rank in range(world_size)]
        self.ranks = [RankNode(self, rank, config) for rank, config in enumerate(steps)]
        self._do: dict[type[m.Effect], Callable[[Any], None]] = {
            m.CallLighthouse: self._call_lighthouse,
            m.OpenStream: self._open_stream,
            m.CloseStream: self._close_stream,
            m.AnswerRank: lambda e: self._answer(e.group_rank, None, e.answer),
            m.FailRank: self._fail_rank,
            m.Waits: self._tell_waits,
            m.AnswerVote: self._answer_vote,
            m.NotifyRank: self._notify_rank,
            m.EndGroup: lambda e: self.end(e.reason),
        }

    @property
    def process_id(self) -> str:
        """The first replica_id of the process."""
        return self.machine.config.replica_id

    def start(self) -> None:
        self.network.listen(self.address, Service(self.process, self._called, self._opened))
        self.process.at_death.append(lambda: self.network.forget(self.process))
        self.process.at_death.append(lambda: self.world.after(0.5, None, self.kill))
        self._open_stream(m.OpenStream(self.machine.replica_id))
        self._tick()
        self._beat()
        for rank in self.ranks:  # the launcher looks after its processes, also those that have not yet called
            rank.process.at_death.append(lambda: self.world.after(2.0, None, self.kill))
            self.world.after(self.cluster.dice.between(0.0, 0.3), rank.process, rank.start)

    def feed(self, event: m.Event) -> None:
        out = self.machine.handle(event, self.process.now_s(self.world))
        self.cluster.saw(self.process.name, event, out)
        for effect in out.effects:
            if self.process.alive:
                self._do[type(effect)](effect)

    def _tick(self) -> None:
        since_s = max(rank.report.waits_since_s for rank in self.ranks) if self._waits_in_sums else None
        if since_s != self._awaits_s:
            for awaited in (False, True):
                if awaited == (since_s is not None) or self._awaits_s is not None:
                    self.feed(m.ReductionAwaited(awaited and since_s is not None))
            self._awaits_s = since_s
        self.feed(m.Tick())
        self.world.after(0.5, self.process, self._tick)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def _called(self, call: Call) -> None:
        event = call.request
        if isinstance(event, tuple):  # another group's rank asks for state
            _, group_rank, quorum_id = event
            call.answer(self.ranks[group_rank].offered(quorum_id) if self.ranks[group_rank].process.alive else None)
            return
        place = (event.group_rank, event.key if isinstance(event, m.Vote) else None)
        self._waiting.setdefault(place, []).append(call)
        if isinstance(event, m.RankCall):  # a vote that is given up is simply asked again
            call.at_cancel = lambda: self._cancelled(place, call)
        self.feed(event)

    def _cancelled(self, place: tuple[int, m.VoteKey | None], call: Call) -> None:
        calls = self._waiting.get(place, [])
        if call in calls:
            calls.remove(call)
            if not calls:
                del self._waiting[place]
                self.feed(m.RankCancelled(place[0]))

    def _answer(self, group_rank: int, vote_key: m.VoteKey | None, reply: Any) -> None:
        for call in self._waiting.pop((group_rank, vote_key), []):
            call.answer(reply)

    def _answer_vote(self, effect: m.AnswerVote) -> None:
        self.truth.decided(self, effect.outcome)
        self._answer(effect.group_rank, effect.outcome.key, effect.outcome)

    def _fail_rank(self, effect: m.FailRank) -> None:
        self._answer(effect.group_rank, effect.vote_key, m.QuorumFailed(f"{effect.code}: {effect.reason}"))

    def _opened(self, hello: m.RankStream, end: End) -> None:
        end.closed = lambda: self.feed(m.RankStream(hello.group_rank, open=False))
        self._rank_streams[hello.group_rank] = end
        self.feed(hello)

    def _notify_rank(self, effect: m.NotifyRank) -> None:
        end = self._rank_streams.get(effect.group_rank)
        if end is not None and self.cluster.notices_late_s:
            late_s = self.cluster.dice_of_threads.between(0.0, self.cluster.notices_late_s)
            self.world.after(late_s, self.process, end.send, effect.notice)
        elif end is not None:
            end.send(effect.notice)

    def _tell_waits(self, effect: m.Waits) -> None:
        for end in self._rank_streams.values():
            end.send(effect)

    # -- the collectives inside -------------------------------------------------------------------------------------

    def forward(self) -> float:
        """Returns the duration of the forward. All ranks agree on whether the loss is finite, as it is summed over them."""
        self.able = self.nan_attempts == 0
        self.nan_attempts = max(0, self.nan_attempts - 1)
        self._tell_wish()
        return self.cluster.setting.compute_s * self.compute_s * self.slow

    def update(self, *, summed: bool) -> float:
        if not summed:
            self._tell_wish()
        return OPTIMIZER_S

    def agree(self, vote_key: m.VoteKey) -> float:
        for known in (self.agreed, self.told):
            while len(known) > 1:
                del known[next(iter(known))]
        self.agreed[vote_key] = (
            all(yes for yes, _ in self.says.values()),
            any(change for _, change in self.says.values()),
        )
        return 0.001

    def _tell_wish(self) -> None:
        """Passes on one rank's order to all ranks of the group, with the sum of figures."""
        if self.wish:
            self.wish = False
            for rank in self.ranks:
                rank.trainer.wish = True

    # -- the lighthouse ---------------------------------------------------------------------------------------------

    def _call_lighthouse(self, effect: m.CallLighthouse) -> None:
        self._asked += 1
        self.world.after(effect.delay_s, self.process, self._call_now, effect.call, self._asked)

    def _call_now(self, call: m.Call, number: int) -> None:
        def answered(reply: Any) -> None:
            if number == self._asked:
                self._heard(reply if reply is not None else m.LighthouseFailed("no answer"))

        if number == self._asked and not self.ended:
            if self.cluster.names_away and not self.is_connected:  # its name does not resolve
                self.world.after(0.1, self.process, answered, None)
                return
            self.network.call(self.process, LIGHTHOUSE, call, answered, timeout_s=20.0)

    def _heard(self, event: m.Event) -> None:
        if isinstance(event, m.LighthouseAnswered):
            self._quorum = event.quorum
            self.cluster.name_of(self).shrink = False
        elif isinstance(event, m.BeatAnswered):
            self._answered_s = self.world.now_s
        self.feed(event)

    def _open_stream(self, effect: m.OpenStream) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream_id = effect.replica_id
        self._connect(effect.replica_id)

    def _close_stream(self, effect: m.CloseStream) -> None:
        self._stream_id = ""
        if self._stream is not None:
            self._stream.close()

    def _connect(self, replica_id: str) -> None:
        if self.ended or replica_id != self._stream_id:
            return
        hello = m.StreamOpened(replica_id, self._quorum, self._settled())
        known = not self.cluster.names_away
        stream = self._stream = self.network.open(self.process, LIGHTHOUSE, hello) if known else None
        again = self.cluster.dice.between(0.2, 0.6)
        if stream is None:
            self.world.after(again, self.process, self._connect, replica_id)
            return
        stream.message = self._heard
        stream.closed = lambda: self.world.after(again, self.process, self._connect, replica_id)

    @property
    def is_connected(self) -> bool:
        """Returns whether the group is connected to a live lighthouse."""
        return self._stream is not None and self._stream.open and self._stream.other.process.alive

    def break_connection(self) -> None:
        """Breaks the connection to the lighthouse."""
        if self._stream is not None and self._stream.open:
            self.network.snap(self._stream)

    def _beat(self) -> None:
        if self._stream is not None and self._stream.open:
            if self.world.now_s - self._answered_s > KEEPALIVE_S:
                self._answered_s = self.world.now_s
                self.world.seen["lighthouse: a silent connection was given up"] += 1
                self._open_stream(m.OpenStream(self._stream_id))
            else:
                self._stream.send((self.process.now_s(self.world), self._report()))
        self.world.after(self.cluster.times.beat_s, self.process, self._beat)

    def _report(self) -> m.Report:
        machine = self.ranks[0].machine
        void = any(rank.weights is None for rank in self.ranks)
        return m.Report(
            self.machine.replica_id,
            m.VOID if void else machine.step,
            machine.commit_quorum_id,
            self._waits_in_sums,
            0.3,
            self._settled(),
            min(rank.report.launched if self._is_current(rank) else 0 for rank in self.ranks),
            phase_limit_s=2 * self.cluster.times.heal_grace_s * any(rank.fences for rank in self.ranks),
            blame=tuple(sorted({other for rank in self.ranks for other in rank.prober.unreachable})),
            quorum_id=self.machine.quorum.quorum_id if self.machine.quorum else 0,
        )

    def _is_current(self, rank: RankNode) -> bool:
        """Returns whether the rank's last report is of the group's quorum, as in rpc/group_server.py."""
        return self.machine.quorum is not None and rank.report.quorum_id == self.machine.quorum.quorum_id

    @property
    def _waits_in_sums(self) -> bool:
        told = [rank.report for rank in self.ranks if self._is_current(rank)]
        inside = len(told) == len(self.ranks) and all(one.waiting or one.past_sums for one in told)
        return inside and any(one.waiting for one in told)

    def _settled(self) -> int:
        return max(rank.machine.settled for rank in self.ranks)

    def wants_to_leave(self) -> None:
        """Scales down, as by SIGTERM: the ranks leave after their next commit, or wait for others, and are not restarted."""
        self.cluster.name_of(self).wanted = False
        self.wish = True
        self.feed(m.WantsToLeave())

    def rank_left(self) -> None:
        self._departed += 1
        if self._departed == len(self.ranks):
            self.left = self.ended = True
            self.leave(clean=True, reason="left")
            self.world.after(0.1, None, self.kill)

    def leave(self, *, clean: bool, reason: str) -> None:
        self.network.call(
            self.process, LIGHTHOUSE, m.Leave(self.machine.replica_id, clean, reason), lambda _: None, timeout_s=5.0
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """Ends the group, as EndGroup does: a Leave is already on its way when the processes go."""
        if not self.ended:
            self.ended = True
            self.truth.ends(self, reason, inside=len(self.inside.here))
            self.cluster.liveness.ends(
                self, self.process.name, reason, member=any(rank.is_member for rank in self.ranks)
            )
            self.world.note(self.process.name, f"ends: {reason}")
            self.leave(clean=False, reason=reason)
            self.world.after(0.01, None, self.kill)

    def kill(self) -> None:
        """Kills all processes of the group, also stopped ones; the launcher notices."""
        self.ended = True
        if not self.stuck:
            for process in (*(rank.process for rank in self.ranks), self.process):
                self.world.kill(process)
        self.cluster.gone(self)
