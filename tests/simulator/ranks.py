"""Simulates a trainer's rank: drives the real step.StepMachine, and replaces its environment (forward, backward, optimizer, weights).

Weights are one number, the hash of their history. A gradient names its slot and the weights that it was computed with, so that a sum shows
who contributed what, and from which state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from zlib import crc32

from ft.protocol import messages as m
from ft.protocol.compare import DIGEST_WORDS, as_sent
from ft.protocol.step import Phase, StepConfig, Tail
from tests.simulator.probes import Prober
from tests.simulator.trainer import Trainer

if TYPE_CHECKING:
    from tests.simulator.servers import GroupNode

RETRY_S = 0.5
VOTE_TRIES = 20
WATCHDOG_S = 100.0  # train_timeout_seconds
FIRST_STEP_S = 300.0  # init_timeout_seconds
WORD_S = 3.0  # a word of the server's is good for so long
JOINT_VOTE_S = 2.0  # ft.agreement.Agreement.joint_vote_s
DIGEST_INTERVAL = 5  # steps between two comparisons of weights, which never go wrong here
INITIAL = 1  # the weights before the first step, the same everywhere


def digest(*parts: Any) -> int:
    return crc32(repr(parts).encode())


@dataclass(frozen=True)
class Snapshot:
    """The state that one rank offers to joiners, or writes into a checkpoint."""

    weights: int
    state: dict[str, Any]  # StepMachine.state_dict()

    @property
    def commit_id(self) -> str:
        return str(self.state["commit_id"])


@dataclass(frozen=True)
class Given:
    """The contribution of a rank to a collective: the tail, and a gradient per slot (none: zeros)."""

    tail: tuple[float, ...]
    gradients: dict[int, int]  # slot -> the weights it was computed with
    tokens: dict[int, float]


@dataclass(frozen=True)
class RankReport:
    """The newest report of a rank to its group's server."""

    quorum_id: int = 0
    launched: int = 0
    waiting: bool = False
    past_sums: bool = False
    waits_since_s: float = 0.0


NOTHING = Given((), {}, {})


@dataclass(frozen=True)
class Sums:
    """The result of a collective."""

    gradients: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, float] = field(default_factory=dict)
    contributors: tuple[int, ...] = ()  # replica ranks

    @cached_property
    def text(self) -> str:
        """Returns a text of the inputs of the new weights; one for all ranks that hold these sums."""
        return repr(sorted(self.gradients.items()))


class RankNode:
    """One process. `feed` gives an event to the machine; what it wants is carried out by the trainer's thread (trainer.py)."""

    def __init__(self, group: GroupNode, group_rank: int, config: StepConfig) -> None:
        self.cluster = cluster = group.cluster
        self.world, self.network, self.truth = cluster.world, cluster.network, cluster.truth
        self.group = group
        self.group_rank = group_rank
        host = group.site if group_rank == 0 or not cluster.setting.spread else f"{group.site}.{group_rank}"
        self.process = cluster.new_process(f"{group.process.name}/{group_rank}", host, group.site)
        self.machine = cluster.machines.step(config, cluster.machines.ledger(1, cluster.setting.slots_per_step))
        self.weights: int | None = INITIAL  # None: void, the state is arriving
        self.commit_id = ""  # of the weights, as the truth knows them
        self.is_to_go_back = False  # its last commit is a spike, after which the job goes back to a checkpoint
        self.launched = 0  # reductions in the newest quorum
        self.waiting = self.past_sums = False
        self.waits_since_s = 0.0
        self.report = RankReport()
        self.word_s = -math.inf  # when its server last said that the group waits for others
        self._still_s = 0.0  # without a step, and without that word
        self._may_be_still_s = FIRST_STEP_S
        self.step = 0  # committed, as the trainer has seen it: the machine may be ahead by held steps
        self.trainer = Trainer(self)
        self.prober = Prober(self)
        self.progress_s = self.world.now_s
        self._quorum: m.QuorumResult | None = None
        self._kept = NOTHING
        self._given: Given | None = None  # what was sent last
        self._sums = Sums()
        self._held: dict[int, Sums] = {}
        self._arrived: Snapshot | None = None
        self._offer: tuple[int, Snapshot] | None = None
        self._went_back_from = ""  # commit id of the newest spike that it did not apply
        self._readers: frozenset[str] = frozenset()  # groups that are to fetch it here
        self.sent: set[str] = set()  # those of them that have all of it, or read no more
        self._ended_quorum = 0  # the newest of which a notice said that it is over
        self._pending: dict[int, Callable[[], None]] = {}  # quorum_id -> how to give up what waits on it
        self._interrupted_quorum = 0  # the newest whose waits were ended
        self._asked = 0  # counts requests and fetches: an answer to an older one is ignored
        self._fetching = 0
        self.fetches = False  # the state of another group
        self._checkpoints: dict[int, Snapshot] = {}
        self.do: dict[type[m.Effect], Callable[[Any], None]] = {
            m.AskQuorum: self._ask_quorum,
            m.Configure: self._configure,
            m.Compute: self._compute,
            m.LaunchRemaining: self._launch,
            m.ReportWeightsDiffer: self.truth.differ,
            m.CastVote: self._cast_vote,
            m.AbandonGeneration: self._abandon,
            m.DropGradients: self._drop_gradients,
            m.Fence: self._fence,
            m.CommitStep: self._commit,
            m.HoldSums: self._hold,
            m.DropHeld: self._drop_held,
            m.LoadState: self._load_state,
            m.LoadCheckpoint: self.trainer.restore,
            m.ReportSettled: self._settle,
            m.RejoinUnderNewId: lambda e: group.leave(clean=False, reason=e.reason),
            m.Stop: self._stop,
        }

    def start(self) -> None:
        stream = self.network.open(self.process, self.group.address, m.RankStream(self.group_rank, open=True))
        if stream is None:
            self.exit("no group server")
            return
        stream.message = self._hear
        stream.closed = lambda: self.exit("the group server is gone")
        self.process.at_death.append(lambda: self.cluster.collectives.dies(self.process))
        self.process.at_death.append(lambda: self.network.forget(self.process))
        self.trainer.begin()
        self._tick()
        self._tell()

    def _tell(self) -> None:
        """Reports twice a beat, as the thread "ft-report" does, which stands still with a trainer that holds the interpreter."""
        if not (self.trainer.hangs and self.trainer.holds_interpreter):
            self.report = RankReport(self.quorum_id, self.launched, self.waiting, self.past_sums, self.waits_since_s)
        self.world.after(self.cluster.times.beat_s / 2, self.process, self._tell)

    def _hear(self, message: m.Event) -> None:
        """Handles a message from the group's server."""
        if isinstance(message, m.Waits):
            self.word_s = self.world.now_s
            self.world.seen["event: Waits"] += 1  # no machine's, as Released
        else:
            if isinstance(message, m.MemberLost | m.GenerationAborted):
                self._ended_quorum = max(self._ended_quorum, message.quorum_id)
            self.feed(message)

    def feed(self, event: m.Event) -> None:
        if not self.process.alive:
            return
        before = self.machine.phase
        out = self.machine.handle(event, self.process.now_s(self.world))
        if self.machine.phase is not before:
            self.world.seen[f"step: {before.name} to {self.machine.phase.name}"] += 1
        self.cluster.saw(self.process.name, event, out)
        if not out.effects:
            return
        for effect in out.effects:
            if isinstance(effect, m.InterruptCollectives):  # the thread that would take it may be in the wait
                self._interrupted_quorum = effect.quorum_id
                self._give_up_if_interrupted(effect.quorum_id)
            else:
                self.trainer.queue.append(effect)
        self.trainer.run()

    @property
    def quorum_id(self) -> int:
        """The ID of the newest quorum that it knows; 0: none."""
        return self._quorum.quorum_id if self._quorum else 0

    @property
    def is_member(self) -> bool:
        """Returns whether the rank is or was a member."""
        return self._quorum is not None

    def reaches(self, phase: str) -> None:
        """Marks a point of the heal; a joiner may be meant to die at it."""
        dies_in = self.cluster.name_of(self.group).dies_in
        if dies_in and dies_in[0] == phase and self.process.alive:
            dies_in.pop(0)
            self.world.seen[f"joiner died: {phase}"] += 1
            self.group.harmed = True
            self.world.kill(self.process)

    def exit(self, why: str) -> None:
        if self.process.alive:
            self.world.note(self.process.name, f"exits: {why}")
            self.cluster.liveness.ends(self.group, self.process.name, why, member=self.is_member)
            self.world.kill(self.process)

    def _tick(self) -> None:
        if self.trainer.is_idle:
            self.feed(m.Tick())
        self.prober.tick()
        self._watch_myself()
        self.world.after(1.0, self.process, self._tick)

    def _watch_myself(self) -> None:
        """A sum that takes too long is given up. The trainer's watchdog: a rank that makes no step ends, but its clock stands still while
        its group waits for others."""
        if self.waiting and self.world.now_s - self.waits_since_s > self.cluster.times.collective_s:
            self.world.seen["collective over its time"] += 1
            for cancel in list(self._pending.values()):
                cancel()
        waits = self.cluster.machines.watchdog_stands and self.world.now_s - self.word_s <= WORD_S
        self._still_s += 0.0 if waits else 1.0
        if self._still_s > self._may_be_still_s:
            self.exit(f"no step in {self._may_be_still_s:g} s")

    def interrupt(self) -> None:
        """Ends all waits for other groups: one of them cannot be reached."""
        for cancel in list(self._pending.values()):
            self.world.after(0.01, self.process, cancel)

    # -- quorum -----------------------------------------------------------------------------------------------------

    def _ask_quorum(self, effect: m.AskQuorum) -> None:
        self._asked += 1
        self.reaches("asks")
        self.trainer.waits = ("quorum", effect.call.number)
        call = effect.call
        if self.cluster.name_of(self.group).shrink:
            call = replace(call, member=replace(call.member, shrink_only=True))
        fingerprint = (("layout", self.group.fingerprint or "ours"),)
        self._ask(replace(call, blame=self.prober.unreachable, fingerprint=fingerprint), self._asked)

    def _ask(self, call: m.RankCall, number: int) -> None:
        def answered(reply: Any) -> None:
            if number != self._asked:
                return
            if reply is None:  # broken or timed out: the group still wants an answer
                self.world.after(RETRY_S, self.process, self._ask, call, number)
            elif isinstance(reply, m.Released):
                self._asked += 1
                self.world.seen["event: Released"] += 1
                self.trainer.waits = ("the end", "it is let go")
                self.group.rank_left()
            else:
                self._asked += 1
                self.trainer.go_on(reply)

        if number == self._asked:
            self.network.call(self.process, self.group.address, call, answered, timeout_s=30.0)

    def _configure(self, effect: m.Configure) -> None:
        quorum = effect.quorum
        self._quorum = quorum
        self.prober.watch(quorum.members)
        self.truth.entered(self, quorum)
        self.cluster.liveness.joins(self.group)
        if not quorum.heal and len(self.group.ranks) > 1:
            self.truth.assigns(self, quorum, effect.attempt)
        # An offer is of one quorum: the same state has another assignment in the next.
        self._offer = (quorum.quorum_id, self.snapshot()) if quorum.recover_dst_replica_ranks else None
        self._readers, self.sent = frozenset(quorum.members[rank] for rank in quorum.recover_dst_replica_ranks), set()
        if quorum.heal:
            self.weights = None
        if quorum.same_generation:
            self._configured(quorum, m.Configured(quorum.quorum_id, ok=True))
            return
        self.launched = 0
        self.trainer.waits = ("rendezvous", quorum.quorum_id)
        self._meet(quorum)

    def _configured(self, quorum: m.QuorumResult, event: m.Configured) -> None:
        """The fetch begins last: the others wait for the group, not for its state."""
        if quorum.heal:
            self._fetch(quorum)
        if not self.trainer.hangs_in("configured", lambda: self.trainer.go_on(event)):
            self.trainer.go_on(event)

    def _meet(self, quorum: m.QuorumResult) -> None:
        """Runs the rendezvous: it stands when all are there, and is given up on a notice or after its time."""
        if quorum.heal:
            self.reaches("meets")
        open_question = [True]

        def end(ok: bool, reason: str = "") -> None:
            if open_question:
                open_question.clear()
                self._pending.pop(quorum.quorum_id, None)
                if not ok:
                    self.cluster.collectives.abandon(self.process, self._generation(quorum.quorum_id))
                self._configured(quorum, m.Configured(quorum.quorum_id, ok, reason))

        self._pending[quorum.quorum_id] = lambda: end(False, "rendezvous given up")
        self.world.after(self.cluster.times.rendezvous_s, self.process, end, False, "rendezvous: not all came")
        self.cluster.collectives.join(
            self.process,
            self._generation(quorum.quorum_id),
            ("meet", self.group_rank),
            quorum.replica_rank,
            len(quorum.members),
            None,
            lambda given: end(True) if given is not None else self.prober.look(lambda: end(False, "rendezvous broke")),
            store=self.cluster.nodes[f"http://{quorum.store_address.partition(':')[0]}"].site,
        )
        self._give_up_if_interrupted(quorum.quorum_id)

    def _generation(self, quorum_id: int) -> tuple[Any, ...]:
        assert self._quorum is not None
        return (self._quorum.epoch, quorum_id)

    # -- the step ---------------------------------------------------------------------------------------------------

    def _compute(self, effect: m.Compute) -> None:
        self.progress_s, self._still_s = self.world.now_s, 0.0
        self.trainer.compute(effect)

    def computed(self, effect: m.Compute, able: bool) -> None:
        tokens = {slot: 100.0 + digest(slot) % 50 for slot in effect.slots}
        gradients = dict.fromkeys(effect.slots, self.weights or 0) if able else {}
        kept = self._kept  # of this step, if some of its slots were computed before
        self.world.seen["slots per step: some were added"] += bool(kept.tokens)
        self._kept = Given((), {**kept.gradients, **gradients}, {**kept.tokens, **tokens})
        # what is sent may be damaged on its way: then it is said, and the reader lacks it all the same
        if self._offer is not None and (self._readers <= self.sent or self.cluster.dice_of_sending.chance(0.1)):
            self.world.seen["heal: its source says that all is sent"] += 1
            self.feed(m.ChangeAnnounced(self._offer[0], "the groups that heal from this one have received the state"))
        self.trainer.go_on(m.Computed(tuple(tokens.values()), 1.0 * len(tokens), able))

    def _launch(self, effect: m.LaunchRemaining) -> None:
        if self.trainer.hangs_in("reduction", lambda: self._launch(effect)):
            return
        kept = self._kept
        tail = self._with_digest(effect)
        given = Given(tail, {}, {}) if effect.zeros else Given(tail, kept.gradients, kept.tokens)
        if not effect.zeros:
            assert self.machine.config.keep_gradients or kept is not self._given, (
                "sends gradients again that are not kept"
            )
            self._given = kept
        quorum = self._quorum
        assert quorum is not None
        digests = (
            DIGEST_WORDS * len(quorum.members) if (effect.step % m.STEPS_PER_BRANCH + 1) % DIGEST_INTERVAL == 0 else 0
        )
        gave = max(Tail.of(effect.tail, digests).tokens, default=0.0) > 0
        self.truth.meets(self, quorum)
        self.truth.gives(self, quorum.epoch, effect.quorum_id, effect.step, given, gave=gave)
        key = (effect.quorum_id, effect.attempt, effect.step)
        open_work = [True]

        def end(result: tuple[Sums, tuple[float, ...]] | None, reason: str = "") -> None:
            if not open_work:
                return
            open_work.clear()
            self.waiting = False
            self._pending.pop(effect.quorum_id, None)
            if result is None:
                self.cluster.collectives.abandon(self.process, self._generation(effect.quorum_id))
                self.trainer.go_on(m.ReduceFailed(*key, reason or "connection reset"))
                return
            self._sums, tail = result
            self.trainer.go_on(m.Reduced(*key, tail))

        self.waiting, self.waits_since_s = True, self.world.now_s
        self.launched += 1
        self.trainer.waits = ("sums", key)
        self._pending[effect.quorum_id] = lambda: end(None, "given up")
        self.cluster.collectives.join(
            self.process,
            self._generation(effect.quorum_id),
            ("reduce", effect.step, effect.attempt, self.group_rank),
            quorum.replica_rank,
            len(quorum.members),
            given,
            end,
            add,
        )
        self._give_up_if_interrupted(effect.quorum_id)

    def _with_digest(self, effect: m.LaunchRemaining) -> tuple[float, ...]:
        at = effect.digest_at
        if not at:
            return effect.tail
        assert self.weights is not None, f"{self.process.name} compares a void state"
        figures = tuple(float(1 + (self.weights >> 23 * i) % (1 << 23)) for i in range(DIGEST_WORDS))
        return (*effect.tail[:at], *as_sent(figures, copied=effect.copied), *effect.tail[at + DIGEST_WORDS :])

    def _give_up_if_interrupted(self, quorum_id: int) -> None:
        """Gives up what waits on an interrupted quorum, also what is launched after the interrupt."""
        cancel = self._pending.get(quorum_id)
        if cancel is not None and quorum_id == self._interrupted_quorum:  # the sockets are shut, then the error comes
            self.world.after(0.01, self.process, cancel)

    def _cast_vote(self, effect: m.CastVote) -> None:
        if self.trainer.hangs_in("vote", lambda: self._cast_vote(effect)):
            return
        vote = effect.vote
        self.truth.votes(self, vote)
        aside, busy = self.machine.votes_in_background(vote), bool(self.trainer.queue)
        if self.machine.every_rank_votes(vote) and len(self.group.ranks) > 1:
            self._agree(vote, able=not busy)
        else:
            self._ask_word(vote, aside=aside or busy)

    def _ask_word(self, vote: m.Vote, *, aside: bool) -> None:
        if aside:
            self.trainer.aside.add(vote.key)
            self.world.seen[f"wait: aside for the word on {vote.kind}"] += 1
        else:
            self.trainer.waits = ("vote", vote.key)
        self._vote(vote, VOTE_TRIES, self._heard_word)
        if aside:
            self.trainer.goes_on()

    def _heard_word(self, outcome: m.Outcome) -> None:
        self.past_sums = False
        key = outcome.key
        if key in self.trainer.aside:
            self.trainer.aside.discard(key)
            self.feed(outcome)
        else:
            self.trainer.go_on(outcome)

    def _agree(self, vote: m.Vote, *, able: bool) -> None:
        """Agrees as ft/agreement.py does: the ranks among themselves, then rank 0 for all."""
        inside, known = self.group.inside, list[m.Outcome]()
        yes = able and vote.verdict == "yes" and not vote.divergent

        def enter() -> None:
            self.trainer.waits, self.past_sums = ("inside", None), True
            self.group.says[self.group_rank] = (yes, vote.change)
            inside.enter(self, ("agree", vote.key), lambda: self.group.agree(vote.key), agreed)

        def decided(outcome: m.Outcome) -> None:
            known.append(outcome)
            enter()

        def agreed() -> None:
            all_do, change = self.group.agreed[vote.key]
            if not all_do and known:
                self.past_sums = False
                self.trainer.go_on(known[0])
            elif not all_do:
                self._ask_word(vote, aside=not able)
            elif self.group_rank:
                tell()
            else:
                self.trainer.waits = ("vote", vote.key)
                joint = replace(vote, change=change, joint=True)
                self.network.call(self.process, self.group.address, joint, asked_for_all, timeout_s=JOINT_VOTE_S)

        def asked_for_all(reply: Any) -> None:
            if isinstance(reply, m.Outcome):
                known.append(reply)
            self.group.told[vote.key] = bool(known) and known[0].verdict == "yes"
            tell()

        def tell() -> None:
            self.trainer.waits = ("inside", None)
            inside.enter(self, ("tell", vote.key), lambda: 0.001, told)

        def told() -> None:
            if self.group.told[vote.key]:
                change, self.past_sums = self.group.agreed[vote.key][1], False
                yes_of_all = m.Outcome("commit", vote.quorum_id, vote.attempt, vote.step, "yes", change, "all said yes")
                self.trainer.go_on(known[0] if known else yes_of_all)
            else:
                self.world.seen["votes: each rank asks after all had said yes"] += 1
                self._ask_word(vote, aside=False)

        if vote.verdict == "failed":
            self.trainer.waits = ("vote", vote.key)
            self._vote(vote, VOTE_TRIES, decided)
        else:
            enter()

    def _vote(self, vote: m.Vote, tries: int, heard: Callable[[m.Outcome], object]) -> None:
        def answered(reply: Any) -> None:
            if isinstance(reply, m.Outcome):
                heard(reply)
            elif isinstance(reply, m.QuorumFailed):
                self.truth.refuses(self, vote, reply.reason)
                self.exit(f"the group has gone on without this rank: {reply.reason}")
            elif self.world.now_s - self.word_s <= WORD_S and self.cluster.machines.held_is_no_try:
                self._vote(vote, tries, heard)
            elif tries == 0:
                self.exit(f"no outcome of the vote {vote.key}")
            else:
                self.world.after(RETRY_S, self.process, self._vote, vote, tries - 1, heard)

        self.network.call(self.process, self.group.address, vote, answered, timeout_s=10.0)

    def _abandon(self, effect: m.AbandonGeneration) -> None:
        self._pending.pop(effect.quorum_id, None)
        self.waiting = False
        if self._quorum is not None:
            self.cluster.collectives.abandon(self.process, self._generation(effect.quorum_id))

    def _drop_gradients(self, effect: m.DropGradients) -> None:
        self._kept = NOTHING

    def _fence(self, effect: m.Fence) -> None:
        """A state is small enough to be copied aside, unless it is read so slowly that the fence waits for it."""
        if self._offer is not None and self.cluster.dice.chance(0.1):
            self.world.seen["heal: offer withdrawn"] += 1
            self._offer = None
        if self.slow_readers:
            self.world.seen["heal: a commit waited for a slow reader"] += 1
            self.trainer.waits = ("fence", effect.step)
            self._fence_until(self.world.now_s + self.cluster.times.heal_grace_s)

    @property
    def fences(self) -> bool:
        """Returns whether the rank's commit waits for readers."""
        return self.trainer.waits is not None and self.trainer.waits[0] == "fence"

    @property
    def slow_readers(self) -> list[str]:
        """Names of the joiners that a fence waits for."""
        if self._offer is None or self._offer[0] <= self._ended_quorum:
            return []
        names = self.cluster.names
        return [name for i in self._readers - self.sent if names[int((name := m.name_of(i))[1:])].slow_heals]

    def _fence_until(self, until_s: float) -> None:
        if self.slow_readers and self.world.now_s < until_s:
            self.world.after(0.1, self.process, self._fence_until, until_s)
            return
        if self.slow_readers:
            self._offer = None
        self.trainer.goes_on()

    def _commit(self, effect: m.CommitStep) -> None:
        if self.machine.phase is Phase.STOPPED:
            return  # effect Stop follows, at which the Manager raises Stopped before the trainer applies this step
        sums = self._held.pop(effect.step) if effect.held else self._sums
        assert self.weights is not None, f"{self.process.name} commits on a void state"
        self._kept = NOTHING
        # like the sums, which a trainer decides from, this is the same in all groups
        self.is_to_go_back = goes_back = self.cluster.setting.rewinds and int(effect.commit_id[2:5], 16) < 80
        is_spike = goes_back or (self.cluster.setting.spikes and int(effect.commit_id[:2], 16) < 32)
        self.weights = self.weights if is_spike else digest(self.weights, sums.text, effect.divisor)
        self.step = effect.step
        parent, self.commit_id = self.commit_id, effect.commit_id
        self.progress_s, self._still_s, self._may_be_still_s = self.world.now_s, 0.0, WATCHDOG_S
        self.cluster.liveness.restart()
        assert self._quorum is not None
        self.truth.commits(self, effect, self._quorum, sums, parent)
        if is_spike:
            self.truth.commits_by_id[effect.commit_id].applied = False
        if is_spike and not goes_back:
            self.feed(m.Skipped(tuple(slot for slot, _ in effect.slots)))
            self.world.seen["spike: a step is not applied"] += 1
        if effect.step % m.STEPS_PER_BRANCH % self.cluster.setting.checkpoint_every == 0 and not goes_back:
            self._checkpoints[effect.step] = self.snapshot()
        self.trainer.update(effect, goes_back=goes_back)

    # -- healing ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        assert self.weights is not None, f"{self.process.name} offers a void state"
        return Snapshot(self.weights, self.machine.state_dict())

    def offered(self, quorum_id: int) -> Snapshot | None:
        """Returns the snapshot that this rank serves to the members of that quorum; None if its offer is over."""
        return self._offer[1] if self._offer is not None and self._offer[0] == quorum_id else None

    def _fetch(self, quorum: m.QuorumResult) -> None:
        """Asks the sources in turn, again and again until the grace is over."""
        self._fetching += 1
        self.fetches = True
        number, until_s = self._fetching, self.world.now_s + self.cluster.times.heal_grace_s
        dice = self.cluster.dice
        # Some states arrive within a step; a few take longer than the others wait.
        is_soon = dice.chance(0.25)
        took_s = dice.between(0.0, 0.3) if is_soon else dice.between(0.05, 3.0) * (5.0 if dice.chance(0.1) else 1.0)
        self._arrived = None
        name = self.cluster.name_of(self.group)
        slow = name.slow_heals > 0
        name.slow_heals -= slow and self.group_rank == 0

        def ask(turn: int) -> None:
            if number != self._fetching:
                return
            if not quorum.sources or self.world.now_s > until_s:
                self.fetches = False
                self._reads_no_more(quorum)
                if slow and self.group_rank == 0:
                    self.world.seen["heal: it did not come in time"] += 1
                    self.cluster.liveness.heal_failed(self.group)
                self.feed(m.HealEnded(quorum.quorum_id, ok=False, reason="no source"))
                return
            self.reaches("fetches")
            source = quorum.sources[turn % len(quorum.sources)]
            asked = ("state", self.group_rank, quorum.quorum_id)
            self.network.call(self.process, source.address, asked, lambda reply: came(turn, reply), timeout_s=5.0)

        def came(turn: int, reply: Any) -> None:
            if isinstance(reply, Snapshot) and not slow:
                self.world.after(took_s, self.process, complete, turn, reply)
            else:
                self.world.after(0.3, self.process, ask, turn + 1)

        def complete(turn: int, snapshot: Snapshot) -> None:
            if number != self._fetching:
                return
            source = quorum.sources[turn % len(quorum.sources)]
            if not self.cluster.serves(source.address, self.group_rank, self.process, quorum.quorum_id):
                ask(turn + 1)
                return
            self.reaches("arrives")
            if name.failing_heals and self.process.alive:
                name.failing_heals -= int(self.group_rank == 0)
                self.fetches = False
                self.world.seen["heal: what arrived was damaged"] += 1
                self.feed(m.HealEnded(quorum.quorum_id, ok=False, reason="what arrived is damaged"))
                return
            self._reads_no_more(quorum)
            self._arrived, self.fetches = snapshot, False
            self.feed(m.HealEnded(quorum.quorum_id, ok=True, state=snapshot.state))

        ask(0)

    def _reads_no_more(self, quorum: m.QuorumResult) -> None:
        """Tells the sources that this joiner reads no more, whether all has come or none ever will."""
        for source in quorum.sources:
            self.cluster.nodes[source.address].ranks[self.group_rank].sent.add(quorum.replica_id)

    def _hold(self, effect: m.HoldSums) -> None:
        self.reaches("holds")
        self._held[effect.step] = self._sums

    def _drop_held(self, effect: m.DropHeld) -> None:
        self._held.clear()
        self._arrived, self.fetches = None, False
        self._fetching += 1

    def _load_state(self, effect: m.LoadState) -> None:
        assert self._arrived is not None, f"{self.process.name} loads a state that has not arrived"
        self.reaches("loads")
        self._went_back_from = ""
        self._take(self._arrived)
        self.truth.heals(self, self._arrived)
        self.world.seen[f"heal: {len(self._held)} steps were held"] += 1
        self._arrived = None

    def restored(self) -> None:
        snapshot = self._load(lambda step: True)
        self.trainer.waits = None
        self._feed_restored(snapshot)
        self.trainer.run()

    def goes_back(self) -> None:
        """Rewinds as ft.manager.Manager.rewind does: effects of held steps, of the state that is given up, are dropped."""
        self._went_back_from, self.weights, points = self.commit_id, None, [x.step for x in self.machine.ledger.rewinds]
        spiked, queue, self.is_to_go_back = self.step, self.trainer.queue, False
        self.trainer.waits = ("inside", None)
        self.feed(m.Rewind("a spike"))
        kinds = [type(effect) for effect in queue]
        begin = len(kinds) - 1 - kinds[::-1].index(m.AbandonGeneration)
        self._carry_out([*queue][begin:])
        self._checkpoints.clear()
        self.world.seen["spike: the job goes back to a checkpoint"] += 1

        def is_history(step: int) -> bool:
            branch, at = divmod(step, m.STEPS_PER_BRANCH)
            return step < spiked and branch <= len(points) and at <= min(points[branch:], default=at)

        def loaded() -> None:
            if self.group.unreadable:
                self.world.seen["spike: no checkpoint could be read"] += 1
            else:
                self._feed_restored(self._load(is_history))
                self._carry_out([*queue])
            self.trainer.begin()

        def read() -> float:
            self.group.unreadable = self.cluster.dice_of_checkpoints.chance(0.1)
            return self.cluster.dice_of_checkpoints.between(0.05, 2.0)

        self.group.inside.enter(self, ("back", spiked), read, loaded)

    def _carry_out(self, effects: list[m.Effect]) -> None:
        """Carries out these effects at once, and drops all others that are queued."""
        self.trainer.queue.clear()
        for effect in effects:
            self.do[type(effect)](effect)

    def _load(self, is_history: Callable[[int], bool]) -> Snapshot | None:
        snapshot = self.cluster.newest_checkpoint(self.group_rank, is_history)
        if snapshot is None:
            self.weights, self.commit_id, self.step = INITIAL, "", 0
        else:
            self._take(snapshot)
        return snapshot

    def _feed_restored(self, snapshot: Snapshot | None) -> None:
        """Begins the next branch if the rank has gone back and has no other state since."""
        spiked, self._went_back_from = self._went_back_from, ""
        before, waits = self.commit_id, self.trainer.waits
        self.trainer.waits = ("a checkpoint", "")
        self.feed(m.Restored(snapshot.state if snapshot else None))
        if spiked:
            self.commit_id, self.step = self.machine.commit_id, self.machine.step
            self.truth.goes_back(self, spiked, before)
        self.trainer.waits = waits

    def _take(self, snapshot: Snapshot) -> None:
        self.weights, self.commit_id, self.step = snapshot.weights, snapshot.commit_id, int(snapshot.state["step"])
        self.progress_s = self.world.now_s

    # -- the rest ---------------------------------------------------------------------------------------------------

    def _settle(self, effect: m.ReportSettled) -> None:
        self.truth.settles(self, effect.step)
        for step in [step for step in self._checkpoints if step <= effect.step]:
            self.cluster.publish(step, self.group, self.group_rank, self._checkpoints.pop(step))

    def _stop(self, effect: m.Stop) -> None:
        if effect.reason.startswith("no quorum"):
            self.exit(effect.reason)
        else:
            self.cluster.job_stopped(effect.reason)


def add(given: list[Given]) -> tuple[Sums, tuple[float, ...]]:
    """Returns the sums, and the sum of the tails."""
    gradients: dict[int, int] = {}
    tokens: dict[int, float] = {}
    for one in given:
        for slot, weights in one.gradients.items():
            assert slot not in gradients, f"slot {slot} is in one sum twice"
            gradients[slot], tokens[slot] = weights, one.tokens[slot]
    sums = Sums(gradients, tokens, tuple(rank for rank, one in enumerate(given) if one.gradients))
    return sums, tuple(map(sum, zip(*(one.tail for one in given), strict=True)))
