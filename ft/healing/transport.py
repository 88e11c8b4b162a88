"""The face of a healing transport: what a source and a joiner ask of it, whichever wire it uses.

    source:  offer(state.snapshot(), ...)  at a step's boundary, before the forward
             fence()                       before the optimizer changes the state; a source that has nothing on offer may call it, too
    joiner:  values = fetch(sources, state.snapshot(), ...)     in a thread of its own, while zeros are launched
             state.load(values)            when all ranks of the group have all of it

From the first byte until `fetch` returns, the joiner's tensors are a mixture: its state is void, and void it stays if `fetch` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from ft.healing.capture import Snapshot


class HealFailed(RuntimeError):
    """The state was not received. `touched`: some of the joiner's tensors may hold bytes of it. `blame`: the sources that failed.
    `unlike`: every source offers a state of another layout than the joiner's, so no other try will do."""

    def __init__(self, reason: str, *, touched: bool, blame: Sequence[str] = (), unlike: bool = False) -> None:
        super().__init__(reason)
        self.touched = touched
        self.blame = tuple(blame)
        self.unlike = unlike


class Fenced(Enum):
    """How a fence ended. In all three cases the state may be changed now."""

    FREE = "nobody needs any more of it"
    COPIED = "what is unsent was copied aside"
    WITHDRAWN = "the offer is withdrawn: its readers heal anew"


@dataclass(frozen=True)
class HealConfig:
    """[fault_tolerance.healing] of a rank."""

    heal_copy_bytes: int = (
        256 << 20
    )  # at most so much is copied aside for readers who are not done when the source commits
    heal_grace_s: float = (
        30.0  # a commit waits so long until the rest is that small; a connection may be silent so long
    )
    heal_streams: int = 2  # connections to a single source: one alone is bound by the core that fills it
    offer_wait_s: float = 30.0  # a joiner waits so long for an offer that is not there yet


@dataclass(frozen=True)
class Source:
    """A rank that has the state. `address`: its transport's, from checkpoint_metadata."""

    replica_id: str
    address: str


Progress = Callable[[int, int], None]  # bytes received and verified, of how many; called from the transport's threads


class Transport(Protocol):
    """One per rank. `offer`, `fence` and `withdraw` belong to the thread that commits; `fetch` blocks the thread that calls it."""

    @property
    def address(self) -> str:
        """What a joiner is told (checkpoint_metadata)."""
        ...

    def offer(self, snapshot: Snapshot, *, quorum_id: int, step: int, readers: Sequence[str]) -> None:
        """Serves this state, and no other, to the joiners (replica ids) until fence or withdraw. An older offer is withdrawn."""
        ...

    @property
    def is_taken(self) -> bool:
        """Whether there is an offer, and each of its readers has been sent all of it. Any thread may ask."""
        ...

    def fence(self) -> Fenced:
        """Afterwards the offered tensors may change. Never waits longer than heal_grace_s, whatever the readers do."""
        ...

    def end_offer(self, quorum_id: int, reason: str) -> None:
        """From any thread: that quorum is over, and so is its offer, if that is what there is. A fence that waits for it ends."""
        ...

    def withdraw(self, reason: str) -> None:
        """The offer is over, at once: its readers get nothing more that they would believe."""
        ...

    def fetch(
        self, sources: Sequence[Source], into: Snapshot, *, quorum_id: int, step: int, progress: Progress | None = None
    ) -> dict[str, Any]:
        """Receives into the tensors of `into`, from up to two sources; from one alone, and with an error logged, where they do not hold the
        same bits. Returns, after every byte has been verified, what State.load takes. Raises HealFailed."""
        ...

    def tell_done(self, sources: Sequence[Source], *, quorum_id: int, step: int) -> None:
        """Nothing more of that offer will be read here, whether all has come or none: so no fence waits for this joiner. A source that does
        not hear it at once is not waited for. `fetch` does so by itself where it has received everything."""
        ...

    def stop(self, reason: str) -> None:
        """A fetch that runs in another thread ends now, with HealFailed."""
        ...

    def close(self) -> None:
        """Ends all threads and connections. May be called twice."""
        ...
