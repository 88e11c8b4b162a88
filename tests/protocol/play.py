"""Plays text transcripts of the protocol's machines, in the manner of raft's datadriven tests.

    == a broken stream is a loss now and final          the title of one transcript; comments begin with #
    lighthouse min_replicas=3                           a machine; until the next one all commands are said to it
    call a b c                                          a command, or an event of ft/protocol/messages: `StreamClosed c:1 at=2.5`
        Persist 1, settled=0; -- all have called        what came of it: effects, and behind -- the machine's state where it has changed

`python -m tests.protocol.play FILE...` writes the outcomes anew; read the difference before you commit it. Commands: the methods of
LighthousePlayer, GroupPlayer and RankPlayer. Words of a command are positional arguments or name=value, as literals of Python; `a:1,b:1`
is a tuple of ids, `layout:1,lr:1` a fingerprint.

Time that passes without ticks (`at=`) counts as a stop of the process where it is longer than half a heartbeat timeout: use `tick`.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ft.protocol import messages as m
from ft.protocol.group import GroupConfig, GroupMachine
from ft.protocol.lighthouse import LighthouseConfig, LighthouseMachine
from ft.protocol.messages import Member
from ft.protocol.step import Ledger, StepConfig, StepMachine

HERE = Path(__file__).parent
TIMES = {field.name for field in dataclasses.fields(m.Timeouts)}


# ------------------------------------------------------------------------------------------------ text


INLINE = {"call", "member", "outcome", "vote"}  # fields of one class only, so its name says nothing
UNNAMED = {*INLINE, "answer", "code", "kind", "notice", "quorum", "replica_id", "replica_ids", "verdict"}
ORDINARY = {"address": "http://a", "store_address": "store-a", "group_rank": 0}  # of the group and rank that are played
SHORT = {  # the lighthouse's reasons, of which transcripts are full
    " healthy groups have requested a quorum": " called",
    "all previous members have requested a quorum": "all previous members have called",
    "more than half is needed, so that no second quorum can form": "no majority",
    "the first request has waited": "waited",
    " s for the others": " s",
    "none of them has a state of the previous quorum, but": "no heir,",
    " of its members may come back": " may come back",
    " cannot work together: they cannot connect, or their fingerprints differ": " cannot work together",
}


def of_branch(step: int) -> str:
    """A step: "7", or "1/7" of branch 1."""
    return f"{step // m.STEPS_PER_BRANCH}/{m.step_of(step)}" if step >= m.STEPS_PER_BRANCH else str(step)


def show(value: Any) -> str:
    """An effect, or what is in it: its name and the fields that differ from their defaults."""
    if isinstance(value, m.Persist):
        of = value.saved.quorum.quorum_id if value.saved.quorum else "no quorum"
        last_id = "" if of == value.saved.last_id else f", last_id={value.saved.last_id}"
        return f"Persist {of}{last_id}, settled={of_branch(value.saved.settled)}"
    if isinstance(value, m.Answer) and value.replica_ids == value.quorum.ids:
        return f"Answer all {show(value.quorum)}"
    if isinstance(value, m.Quorum):
        step, _, commit_id = value.reference
        return f"<{value.quorum_id}: {' '.join(value.ids)}; step {of_branch(step)} {commit_id[:8]} of {value.holders}>"
    if isinstance(value, m.QuorumResult):
        heal = f" heals from {' '.join(str(source.replica_rank) for source in value.sources)}" if value.heal else ""
        place = f"{value.replica_rank} of {' '.join(value.members)}"
        again = " in the same generation" * value.same_generation
        return f"<{value.quorum_id}: {value.replica_id} is {place}, at {value.store_address}{heal}{again}>"
    if isinstance(value, m.CommitStep):
        marks = "".join(f" {name}" for name in ("held", "leave") if getattr(value, name))
        slots = " ".join(f"{slot}:{replica_id}" for slot, replica_id in value.slots) + (
            f" holes={value.holes}" if value.holes else ""
        )
        summed = f"{show(value.contributors)} of {value.quorum_size} divisor={value.divisor} loss={value.mean_loss}"
        marks += f" after {value.rewound}" if value.rewound else ""
        return f"CommitStep step={of_branch(value.step)} {value.commit_id[:8]} {summed} slots {slots}{marks}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(show, value)) + ")"
    if isinstance(value, str):
        value = value[:8] if re.fullmatch("[0-9a-f]{32}", value) else value  # of a commit id
        return value if re.fullmatch(r"[\w:.]+", value) else repr(value)
    if not dataclasses.is_dataclass(value):
        return repr(value)
    words = [type(value).__name__]
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        ordinary = isinstance(value, (Member, m.RankCall, m.Vote)) and given == ORDINARY.get(field.name, field.default)
        default = field.default is not dataclasses.MISSING and given == field.default
        if ordinary or default or (isinstance(value, Member) and given == ""):
            continue
        text = of_branch(given) if field.name in ("step", "settled") else show(given)
        if field.name in INLINE:
            text = text.partition(" ")[2]
        elif field.name == "notice":
            text = text.replace("quorum_id=", "", 1)
        elif dataclasses.is_dataclass(given) and text[0] != "<":
            text = f"({text})"
        if text:
            words.append(field.name if given is True else text if field.name in UNNAMED else f"{field.name}={text}")
    return " ".join(words)


def words_of(line: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The command of a line, its arguments and named arguments."""
    name, *words = re.findall(r"""(?:'[^']*'|"[^"]*"|\([^()]*\)|\{.*\}|\S)+""", line)
    positional, named = list[Any](), dict[str, Any]()
    for word in words:
        key, equals, text = word.partition("=") if re.match(r"\w+=", word) else ("", "", word)
        if key == "fingerprint":
            value: Any = tuple(tuple(pair.split(":")) for pair in text.split(","))
        elif "," in text and text[0] not in "({'\"":
            value = tuple(filter(None, text.split(",")))
        else:
            try:
                value = ast.literal_eval(text.replace("nan", "1e999-1e999") if text == "nan" else text)
            except (ValueError, SyntaxError):
                value = float(text) if text in ("nan", "inf", "-inf") else text
        if equals:
            named[key] = value
        else:
            positional.append(value)
    return name, positional, named


# ------------------------------------------------------------------------------------------------ players


class Player:
    """A machine, its clock, and the events that it is fed. Each command yields lines."""

    machine: Any

    def __init__(self) -> None:
        self.now_s = 0.0
        self.effects: list[m.Effect] = []
        self.shown: tuple[str, ...] = ()

    def say(self, event: m.Event) -> list[m.Effect]:
        effects = list(self.machine.handle(event, self.now_s).effects)
        self.effects += effects
        return effects

    def event(self, name: str, *given: Any, **named: Any) -> list[m.Effect]:
        return self.say(getattr(m, name)(*given, **named))

    def state(self) -> tuple[str, ...]:
        """Returns the state of the machine that a reader needs beside its effects, in parts; only changed parts are shown."""
        raise NotImplementedError

    def told(self) -> list[str]:
        """Returns the effects of the last command, as text."""
        return [show(effect) for effect in self.effects]

    def command(self, line: str) -> list[str]:
        name, given, named = words_of(line)
        self.now_s = float(named.pop("at", self.now_s))
        self.effects = []
        lines = getattr(self, name.replace("-", "_"), None)
        found = lines(*given, **named) if lines else self.event(name, *given, **named)
        told: dict[str, str] = {}  # a notice that is repeated is told once
        for text in found if isinstance(found, Iterator) else self.told():
            told.setdefault(text.partition("] ")[2] if text[0] == "[" else text, text)
        times = ["", *(text.partition("] ")[0] if text[0] == "[" else "" for text in told.values())]
        texts = [
            text.removeprefix(f"{then}] ") if then else text for then, text in zip(times, told.values(), strict=False)
        ]
        return [*texts, *self.news()]

    def news(self) -> list[str]:
        """Parts of the state that have changed since they were shown."""
        before, self.shown = self.shown, self.state()
        changed = [part for part in self.shown if part and part not in before]
        return [f"-- {', '.join(changed)}"] if changed else []


class LighthousePlayer(Player):
    """A lighthouse. Groups are named by letters; "a" is a:1. `saved`: it starts from the state of the one before, through JSON."""

    def __init__(self, kind: str = "pharos", **config: Any) -> None:
        super().__init__()
        self.kind: Any = kind
        start = {name: config.pop(name) for name in ("saved", "recover", "lower_limits", "epoch") if name in config}
        self.machine = LighthouseMachine(_config(LighthouseConfig, **config), 0.0, **{"epoch": "job", **start})
        self.asked: dict[str, int] = {}  # the number of each group's newest question
        self.answered = 0  # the newest quorum that was answered to all: its answer tells its members
        self.running: m.Quorum | None = None  # what members know of a lighthouse before this one

    def config(self, **config: Any) -> None:
        """Replaces the settings from now on."""
        self.machine.config = _config(LighthouseConfig, **config)

    def say(self, event: m.Event) -> list[m.Effect]:
        effects = super().say(event)
        for effect in effects:
            if isinstance(effect, m.Answer) and effect.replica_ids == effect.quorum.ids:
                self.answered = effect.quorum.quorum_id
        return effects

    def event(self, name: str, *given: Any, **named: Any) -> list[m.Effect]:
        # "running": the one that members know; "before": of the lighthouse before; a number: one of that id, without its members
        if "quorum" in named:
            known = {"running": self.machine.quorum or self.running, "before": self.running}
            named["quorum"] = known[named["quorum"]] if named["quorum"] in known else m.Quorum(named["quorum"], ())
        return super().event(name, *given, **named)

    def call(self, *names: str, step: int = 0, branch: int = 0, id: Any = 1, kind: Any = None, **more: Any) -> None:
        """Lets each group ask for a quorum. Step 4 of branch 1 has come from the checkpoint, if `quorum` is 0, and else of that quorum."""
        calls = ("known", "failed", "blame", "fingerprint", "number", "epoch")
        fields = {key: more.pop(key) for key in list(more) if key not in calls}
        of_quorum = fields.pop("quorum", 0)
        for name in names:
            commit: dict[str, Any] = {}
            number = more.get("number", self.asked.get(name, 0) + 1)
            if self.kind == "pharos":
                commit = {"commit_id": f"c{step}", "commit_quorum_id": min(step, 1)} if step != m.VOID else {}
                if branch:
                    commit = {"commit_id": f"b{branch}c{step}", "commit_quorum_id": of_quorum}
                self.asked[name] = number
            packed = m.STEPS_PER_BRANCH * branch + step
            member = Member(**{"replica_id": f"{name}:{id}", "step": packed, **commit, **fields})
            numbered = {"number": number} if self.kind == "pharos" else {}
            self.say(m.Call(member, kind or self.kind, **{**more, **numbered}))

    def open(self, *names: str, id: Any = 1) -> None:
        """The streams of the groups are open."""
        for name in names:
            self.say(m.StreamOpened(f"{name}:{id}"))

    def beat(self, *names: str, id: Any = 1, kind: Any = None) -> None:
        """Each group's heartbeat."""
        for name in names:
            self.say(m.Beat(f"{name}:{id}", kind or self.kind))

    def fail(self, names: str, *, known: int = 1, cut: str = "") -> None:
        """Lets all ask after a failed generation. cut: "ab bc" are pairs of groups that both report that they cannot connect."""
        for name in names:
            self.call(name, known=known, failed=True, blame=_blame(name, cut))

    def links(self, names: str, *, id: Any = 1, cut: str = "") -> None:
        """Each group reports which members it cannot reach now."""
        for name in names:
            self.say(m.Report(f"{name}:{id}", 0, blame=_blame(name, cut)))

    def tick(self, *, until: float, beats: str = "", links: str = "", id: Any = 1, cut: str = "") -> Iterator[str]:
        """Ticks every 0.1 s, after heartbeats or reports of links. Yields the effects."""
        while self.now_s < until - 1e-9:
            self.now_s = round(self.now_s + 0.1, 3)
            self.effects = []
            self.beat(*beats, id=id)
            self.links(links, id=id, cut=cut)
            self.say(m.Tick())
            yield from (f"[{self.now_s:g}] {show(effect)}" for effect in self.effects)

    def watch(
        self, *, until: float, waits: str = "", hangs: str = "", beats: str = "", every: float = 1, **more: Any
    ) -> Iterator[str]:
        """Reports each second until a member is lost: `waits` as waiting in the step's sums, `hangs` as not waiting; `beats` only
        beat, under `id`. `ahead`: those of them that wait in the next sums already. `repeats`: those whose report is of the quorum before,
        in which they launched 100 attempts."""
        lost = set(self.machine.roster.lost)
        ahead, repeats, id_ = more.pop("ahead", ""), more.pop("repeats", ""), more.pop("id", 1)
        while self.now_s < until - 1e-9 and lost == set(self.machine.roster.lost):
            self.effects = []
            for name in sorted(waits + hangs):
                fields = {"median_step_s": 1.0, "launched": 1 + (name in ahead), **more}
                if name in repeats:
                    fields |= {"launched": 100, "quorum_id": self.machine.quorum.quorum_id - 1}
                self.say(m.Report(f"{name}:1", 1, 1, name in waits, **fields))
            self.beat(*beats, id=id_)
            yield from map(show, self.effects)
            yield from self.tick(until=round(self.now_s + every, 1))

    def sits_out(self, replica_id: str) -> Iterator[str]:
        """Yields the reason why a group is kept out, or "no"."""
        yield self.machine.roster.why_it_sits_out(replica_id) or "no"

    def limits(self) -> Iterator[str]:
        yield show(self.machine.config.limits)

    def members(self) -> Iterator[str]:
        yield from map(show, self.machine.quorum.members)

    def state(self) -> tuple[str, ...]:
        q = self.machine.quorum
        is_news = q and q.quorum_id != self.answered
        known = f"{q.quorum_id} {''.join(member.name for member in q.members)}" if is_news else ""
        reason = self.machine.reason
        for text, short in SHORT.items():
            reason = reason.replace(text, short)
        return known, reason


def _blame(name: str, cut: str) -> tuple[str, ...]:
    return tuple(f"{other}:1" for pair in cut.split() if name in pair for other in pair if other != name)


def _config(make: Callable[..., Any], **config: Any) -> Any:
    times = {name: config.pop(name) for name in list(config) if name in TIMES}
    return make(**config, times=m.Timeouts(**times))


class GroupPlayer(Player):
    """A group server, `size` ranks with open streams. `joined`: all have asked, and quorum 1 of a:1 and b:1 was answered."""

    def __init__(
        self, size: int = 2, *, joined: bool = False, limits: dict[str, Any] | None = None, **config: Any
    ) -> None:
        super().__init__()
        self.machine = GroupMachine(_config(partial(GroupConfig, "a:1", size, "http://a", "store-a"), **config), 0.0)
        for rank in range(size):
            self.say(m.RankStream(rank, True))
        if joined:
            self.ask(*range(size))
            self.say(m.LighthouseAnswered(self._quorum(1, ()), limits=m.JobLimits(**limits) if limits else None))

    def ask(self, *ranks: int, known: int = 0, failed: bool = False, number: int = 0, **member: Any) -> None:
        """Each rank asks for a quorum."""
        for rank in ranks:
            self.say(m.RankCall(rank, Member("", **member), f"http://a/{rank}", known, failed, number=number))

    def vote(self, *ranks: int, verdict: Any = "yes", kind: Any = "commit", quorum: int = 1, **more: Any) -> None:
        """Each rank votes, in attempt 0 of step 0 unless said otherwise."""
        for rank in ranks:
            self.say(m.Vote(rank, kind, quorum, **{"attempt": 0, "step": 0, **more}, verdict=verdict))

    def answered(self, quorum_id: int = 1, *ids: str, times: dict[str, Any] | None = None) -> None:
        """The lighthouse answers with a quorum, of a:1 and b:1 unless said otherwise."""
        self.say(m.LighthouseAnswered(self._quorum(quorum_id, ids), m.Timeouts(**times) if times else None))

    def steps(self, end: int) -> None:
        """Rank 0 votes yes on all steps below `end`."""
        for step in range(end):
            self.vote(0, step=step)
        self.effects = self.effects[-1:]

    def tick(self, end: float) -> None:
        """A tick each half second."""
        while self.now_s < end:
            self.now_s += 0.5
            self.say(m.Tick())

    def told(self) -> list[str]:
        """Equal effects of several ranks are one, with all their numbers."""
        ranks: dict[str, list[int]] = {}
        for effect in self.effects:
            rank = getattr(effect, "group_rank", None)
            text = show(effect) if rank is None else show(effect).replace(f"group_rank={rank}", "{}", 1)
            ranks.setdefault(text, []).extend([] if rank is None else [rank])
        return [text.replace("{}", " ".join(map(str, of)), 1) if of else text for text, of in ranks.items()]

    def _quorum(self, quorum_id: int, ids: tuple[str, ...]) -> m.Quorum:
        return m.Quorum(quorum_id, tuple(Member(i, store_address=f"store-{i}") for i in ids or ("a:1", "b:1")))

    def state(self) -> tuple[str, ...]:
        return (self.machine.reason,)


class RankPlayer(Player):
    """A rank of group a:1. A quorum (`part`) is of a:1 and b:1 unless said otherwise."""

    def __init__(self, *, slots_per_step: int = 0, **config: Any) -> None:
        super().__init__()
        self.machine = StepMachine(StepConfig(**config), Ledger(8, slots_per_step))
        # quorum_id, attempt, step of the newest vote of each kind, and sums
        self.keys: dict[str, tuple[int, int, int]] = {}

    def say(self, event: m.Event) -> list[m.Effect]:
        effects = super().say(event)
        for effect in effects:
            if isinstance(effect, m.CastVote):
                self.keys[effect.vote.kind] = (effect.vote.quorum_id, effect.vote.attempt, effect.vote.step)
            elif isinstance(effect, m.LaunchRemaining):
                self.keys["sums"] = self.keys["commit"] = (effect.quorum_id, effect.attempt, effect.step)
            elif isinstance(effect, m.Compute):
                self.keys["sums"] = self.keys["commit"] = (self.quorum_id, effect.attempt, effect.step)
        return effects

    def told(self) -> list[str]:
        """Returns the effects as text; ", as one": the ranks of the group agree by themselves, and one asks for all."""
        votes = [effect.vote for effect in self.effects if isinstance(effect, m.CastVote)]
        as_one = any(map(self.machine.every_rank_votes, votes))
        return [show(effect) + ", as one" * (as_one and isinstance(effect, m.CastVote)) for effect in self.effects]

    def part(
        self,
        quorum_id: int = 1,
        *,
        of: str = "ab",
        heal: bool = False,
        step: int = 0,
        own: bool = False,
        commit: str = "",
        **more: Any,
    ) -> None:
        """The answer of the group's server: this group's place in a quorum. `own`: the reference state is the one in hand."""
        self.quorum_id = quorum_id
        machine, members = self.machine, tuple(f"{name}:1" for name in of)
        reference = (
            (machine.step, machine.commit_quorum_id, machine.commit_id)
            if own
            else (step, min(step, 1), commit or (f"c{step}" if step else ""))
        )
        fields: dict[str, Any] = {
            "replica_rank": of.index("a"),
            "members": members,
            "store_address": "s",
            "reference": reference,
            "sources": (m.Source(1, "http://b"),) if heal else (),
            "recover_dst_replica_ranks": (),
            "participants": tuple(member for member in members if member != "a:1") if heal else members,
            "assigned": 0,
        }
        self.say(m.QuorumResult(quorum_id, "job", "a:1", heal=heal, **{**fields, **more}))

    def configured(self, ok: bool = True, reason: str = "") -> None:
        """Reports that the process group is formed, or not."""
        self.say(m.Configured(self.quorum_id, ok, reason))

    def outcome(self, kind: Any, verdict: Any = "yes", **more: Any) -> None:
        """Delivers the group's outcome of the newest vote."""
        if verdict:
            self.effects = []
            self.say(m.Outcome(kind, *self.keys[kind], verdict, **more))

    def reduced(self, *tail: float, outcome: str = "", **more: Any) -> None:
        """Delivers the sums of the newest reduction. outcome, here and below: the group's outcome, which follows."""
        self.say(m.Reduced(*self.keys["sums"], tuple(map(float, tail))))
        self.outcome("commit", outcome, **more)

    def failed(self, reason: str = "socket closed", *, outcome: str = "") -> None:
        """Reports that a collective of this attempt has failed."""
        self.say(m.ReduceFailed(*self.keys["sums"], reason))
        self.outcome("commit", outcome)

    def enter(self, quorum_id: int = 1, *, computes: bool = False, **more: Any) -> None:
        """Goes through a quorum to the forward; shows the last effects alone. computes: through the backward, too."""
        self.say(m.Begin())
        self.part(quorum_id, **more)
        self.configured()
        self.outcome("configured")
        if computes:
            self.compute()

    def next(self) -> None:
        """Continues to the reduction of the next step."""
        self.say(m.Begin())
        self.compute()

    def finish(self, *tail: float, change: bool = False) -> None:
        """Runs from the forward to the commit; shows the last effects alone."""
        self.compute()
        self.reduced(*(tail or (10, 10, 50, 2, 0)), outcome="yes", change=change)

    def compute(self, *tokens: float, loss: float = 25.0, **more: Any) -> None:
        """Ends forward and backward: tokens for each slot."""
        self.say(m.Computed(tuple(map(float, tokens)) or (10.0,), loss, **more))

    def healed(self, quorum_id: int = 2, *, step: int = 5, of: str = "b", outcome: str = "") -> None:
        """The fetch of a source's state of that step is complete; `of`: the groups that its assignment has slots for."""
        self.say(m.HealEnded(quorum_id, True, source_state(step, of=of)))
        self.outcome("healed", outcome)

    def restored(self, step: int) -> None:
        """A checkpoint of that step is loaded."""
        self.say(m.Restored(source_state(step)))

    def state(self) -> tuple[str, ...]:
        machine, ledger = self.machine, self.machine.ledger
        slots = " ".join(f"{slot}:{replica_id}" for slot, replica_id in ledger.assignment.items())
        held = "void" if machine.void else f"step {of_branch(machine.step)}"
        return (
            machine.phase.name.lower(),
            held,
            f"slots {slots or 'none'}",
            f"holes {ledger.holes or 'none'}",
            f"skipped {ledger.skipped_slots or 'none'}",
            f"left out {ledger.rewinds[-1].skipped}" if ledger.rewinds else "",
        )


def source_state(step: int = 5, *, of: str = "b") -> dict[str, Any]:
    """StepMachine.state_dict() of a source at that step."""
    source = StepMachine(StepConfig(), Ledger(8))
    source.step, source.commit_id, source.commit_quorum_id = step, f"c{step}" if step else "", min(step, 1)
    source.ledger.position = 80
    source.ledger.assign(tuple(f"{name}:1" for name in of))
    return source.state_dict()


# ------------------------------------------------------------------------------------------------ transcripts


def formed(
    names: str, kind: str = "pharos", *, waits: str = "", lost: str = "", fingerprint: m.Fingerprint = (), **config: Any
) -> LighthousePlayer:
    """Returns a job whose members are `names`, all at step 0 of one quorum. Since then `waits` have called, and wait for admission;
    the connections of `lost` broke."""
    player = LighthousePlayer(kind, **{**config, "min_replicas": len(names)})
    player.call(*names, fingerprint=fingerprint)
    player.config(**{"min_replicas": 1, **config})
    player.call(*waits)
    for name in lost:
        player.say(m.StreamClosed(f"{name}:1"))
    return player


def unhealed(times: int, **config: Any) -> LighthousePlayer:
    """Returns a job in which a and b hold a state, and `times` heals of c have failed."""
    player = formed("ab", **config)
    player.call("c", step=m.VOID)
    player.call("a", "b", known=1, step=1)
    for _ in range(times):
        player.call("a", "b", known=2, step=1)
        player.call("c", known=2, step=m.VOID)
    return player


def entered(**config: Any) -> RankPlayer:
    """A rank that has come through quorum 1 to the forward of step 0."""
    player = RankPlayer(**config)
    player.enter()
    return player


def launched(**config: Any) -> RankPlayer:
    """The same with its gradients of slot 0 in a reduction."""
    player = entered(**config)
    player.compute()
    return player


def compared(**config: Any) -> RankPlayer:
    """A rank of group a:1 of three, in the reduction of step 1, whose tail has digests."""
    player = RankPlayer(digest_interval=2, **config)
    player.enter(1, of="abc")
    player.finish(10, 10, 10, 75, 3, 0)
    player.say(m.Begin())
    player.compute()
    return player


def healing(**config: Any) -> RankPlayer:
    """A rank of a fresh group in quorum 2, whose reference is step 5: it has launched zeros."""
    player = RankPlayer(**config)
    player.enter(2, heal=True, step=5)
    return player


def asked(size: int = 2, *, known: int = 0, failed: bool = False, **config: Any) -> GroupPlayer:
    """A group whose ranks have all asked, so that it has called the lighthouse; known=1: it is joined."""
    player = GroupPlayer(size, joined=known == 1, **config)
    player.ask(*range(size), known=known, failed=failed)
    return player


def transcripts(file: Path) -> dict[str, list[str]]:
    """The lines of each transcript of a file, by its title."""
    found: dict[str, list[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            lines = found.setdefault(line.removeprefix("== "), [])
            assert not lines, f"{file.name}: two transcripts named {line}"
        elif line and not found:
            continue  # the head of the file
        elif line:
            lines.append(line)
    return found


def play(lines: list[str]) -> list[str]:
    """The same transcript with the outcomes that the machines give now."""
    player: Player | None = None
    played = list[str]()
    for line in lines:
        if line.startswith("#"):
            played.append(line)
        if line.startswith(("#", " ")):
            continue
        played.append(line)
        name, given, named = words_of(line.partition("  #")[0])
        if name in STARTS:
            before = player if isinstance(player, LighthousePlayer) else None
            if name == "restart" and before:
                named["saved"] = m.PersistentState.from_dict(
                    json.loads(json.dumps(dataclasses.asdict(before.machine.saved)))
                )
            player = STARTS[name](*given, **named)
            if before and isinstance(player, LighthousePlayer):
                player.running = before.machine.quorum or before.running
            player.news()
        else:
            assert player is not None, "a transcript begins with a machine"
            played += _filled(player.command(line.partition("  #")[0]))
    return played


STARTS: dict[str, Any] = {
    "lighthouse": LighthousePlayer,
    "formed": formed,
    "unhealed": unhealed,
    "restart": LighthousePlayer,
    "group": GroupPlayer,
    "joined": partial(GroupPlayer, joined=True),
    "asked": asked,
    "rank": RankPlayer,
    "entered": entered,
    "launched": launched,
    "compared": compared,
    "healing": healing,
}
WIDTH = 136


def _filled(told: list[str]) -> list[str]:
    """Packs outcomes into lines of at most WIDTH."""
    lines = list[str]()
    for text in told:
        if lines and len(lines[-1]) + len(text) < WIDTH:
            lines[-1] += f"; {text}"
        else:
            lines.append(f"    {text}")
    return lines


def main(files: list[str]) -> None:
    for file in map(Path, files or sorted(map(str, HERE.glob("*.txt")))):
        head = file.read_text(encoding="utf-8").partition("\n== ")[0]
        sections = ["\n".join([f"== {title}", *play(lines)]) for title, lines in transcripts(file).items()]
        file.write_text(
            "\n\n".join([head.strip() if not head.startswith("== ") else "", *sections]).lstrip("\n") + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main(sys.argv[1:])
