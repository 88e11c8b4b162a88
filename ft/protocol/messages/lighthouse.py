"""Events and effects of the lighthouse (lighthouse.Lighthouse)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ft.protocol.messages.quorum import Effect, Event, Kind, Member, Notice, Quorum, Refusal, Shape, Terms

# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True)
class Call(Event):
    """A group asks for a quorum. It counts as a beat. `known`: the newest quorum whose answer has arrived (0: none)."""

    member: Member
    kind: Kind = "pharos"
    known: int = 0
    failed: bool = False  # generation `known` failed; else a change is due, or it is the first call
    blame: tuple[str, ...] = ()  # replica_ids that it cannot work with now: no connection, or another shape
    shape: Shape = ()
    number: int = 0  # of this process's calls, growing; a retry repeats it, so that a late copy is recognised


@dataclass(frozen=True)
class CallCancelled(Event):
    """The RPC of a waiting call ended. A caller with a stream still takes part."""

    replica_id: str


@dataclass(frozen=True)
class Beat(Event):
    replica_id: str
    kind: Kind = "pharos"


@dataclass(frozen=True)
class StreamOpened(Event):
    """A group server's Watch stream begins, with its newest quorum and settled step."""

    replica_id: str
    quorum: Quorum | None = None
    settled: int = 0


@dataclass(frozen=True)
class StreamClosed(Event):
    """The connection broke. A stream that was replaced by a newer one of the same id is not reported."""

    replica_id: str


@dataclass(frozen=True)
class Report(Event):
    """On the stream, at most once a second and at each change of `waiting`; counts as a beat."""

    replica_id: str
    step: int  # VOID while healing
    commit_quorum_id: int = 0
    waiting: bool = False  # all its ranks are in the collective (or past it)
    median_step_s: float = 0.0
    settled: int = 0
    launched: int = 0  # reductions in this generation, the newest included: a member with fewer than others is behind
    phase_limit_s: float = 0.0  # limit of the long phase that a rank is in; 0: none, or it is over its limit
    blame: tuple[str, ...] = ()  # as Call.blame, at this moment


@dataclass(frozen=True)
class Leave(Event):
    """The group leaves on purpose."""

    replica_id: str
    clean: bool = True  # the others can finish the running step without it; else the generation fails
    reason: str = "left"
    finished: bool = False  # the run is over, and its last step is saved


class TakeOver(Event):
    """An operator's order: callers may go on without the previous members."""


@dataclass(frozen=True)
class Evict(Event):
    """An operator's order (dashboard: kill or drain)."""

    replica_id: str


# ------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True)
class Persist(Effect):
    """Write `saved` to the state file (temporary file, fsync, rename) before any later effect: an id once seen must not come again."""

    saved: Saved


@dataclass(frozen=True)
class Answer(Effect):
    """Answer every waiting call of these ids with `quorum` and Times, or, where none waits, send it down the id's stream."""

    replica_ids: tuple[str, ...]
    quorum: Quorum


@dataclass(frozen=True)
class Refuse(Effect):
    """Fail the waiting calls of the id. LOST: it may return under a new id, with its state."""

    replica_id: str
    code: Refusal
    reason: str


@dataclass(frozen=True)
class MustRestore(Effect):
    """Answer the waiting calls of these ids: load the newest valid checkpoint, call again with `restored`."""

    replica_ids: tuple[str, ...]
    settled: int  # the newest step known to be settled


@dataclass(frozen=True)
class Notify(Effect):
    """Send the notice down the streams of these ids; one without a stream gets nothing (torchft's)."""

    replica_ids: tuple[str, ...]
    notice: Notice


@dataclass(frozen=True)
class Saved:
    """The state that a lighthouse keeps over its own death."""

    epoch: str
    last_id: int = 0
    settled: int = 0
    kind: Kind = "pharos"
    quorum: Quorum | None = None  # the newest; None: there was none, or none of its members may come back
    terms: Terms | None = None  # of the job that it is of

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Saved:
        """Reads what to_dict wrote, after JSON. Raises TypeError or KeyError for anything else."""
        terms, quorum = data.get("terms"), data["quorum"]  # a file of an earlier version has no terms and no shape
        if quorum:
            step, commit_quorum_id, commit_id = quorum["reference"]
            told = [{**x, "reconfigure_handles": tuple(x["reconfigure_handles"])} for x in quorum["members"]]
            shape = tuple((what, digest) for what, digest in quorum.get("shape", ()))
            members, reference = tuple(Member(**x) for x in told), (step, commit_quorum_id, commit_id)
            quorum = Quorum(quorum["quorum_id"], members, reference, quorum["epoch"], shape)
        return Saved(**{**data, "quorum": quorum or None, "terms": Terms(**terms) if terms else None})
