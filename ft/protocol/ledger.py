"""Which samples are trained on when, each exactly once.

A slot is the batch of one group in one step, named by the position of its first sequence. A step's deal is made once, at its first
quorum: to the participants in the order of their replica_rank, first the holes (slots that were dealt before and never made it into
a commit), then new positions. A deal takes nothing out of the ledger; only a commit does. So a deal may be dropped at any time, and
the ledger that is saved knows nothing of groups and ranks.

With a number of slots per step the data of a step does not depend on who is there: each deal has so many, a group may own several of
them or none, and what belonged to one that is gone is computed by the others in the same step (`redeal`). So a step leaves no holes,
but for slots that were unable. Without it a step has a slot for each group that was there when it was dealt.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from typing import Any

from ft.protocol.messages import UNABLE, process_of

MAX_UNABLE = 3  # times that a slot may turn out to be of no use before the job stops, or goes on without it


@dataclass(frozen=True)
class LedgerEntry:
    """The effect of a commit on the ledger."""

    contributed: tuple[int, ...]  # slots
    holes: tuple[int, ...]  # slots of the deal that did not make it, and will be dealt again
    useless: tuple[int, ...]  # slots that were MAX_UNABLE times unable: skipped, or the reason to stop


class Ledger:
    """Tiny, and identical in every group: it changes by commits alone, and their tails are identical."""

    def __init__(self, slot_size: int, slots_per_step: int = 0) -> None:
        self.slot_size = slot_size
        self.slots_per_step = slots_per_step  # 0: one for each participant
        self.position = 0  # all sequences before it were committed, but for the holes
        self.holes: list[int] = []  # sorted
        self.unable: dict[int, int] = {}  # hole -> times
        self.skipped: list[int] = []
        self.pending: dict[
            int, str
        ] = {}  # the open deal: slot -> replica_id, in replica_rank order; replaced, never changed

    def width(self, participants: int) -> int:
        """Slots of a deal to so many groups."""
        return self.slots_per_step or participants

    def deal(self, participants: Sequence[str]) -> dict[int, str]:
        """The deal of the coming step, in turns. An open one is kept, whoever is there now: `redeal` is for that."""
        if not self.pending:
            count = self.slots_per_step or len(participants)
            new = count - len(self.holes)
            slots = [*self.holes, *range(self.position, self.position + new * self.slot_size, self.slot_size)][:count]
            self.pending = dict(zip(slots, cycle(participants), strict=False))
        return dict(self.pending)

    def redeal(self, participants: Sequence[str]) -> None:
        """Handles the slots of groups that are gone, in the open deal: they become holes at the commit; with slots_per_step others are to
        compute them, each time the first of those who have the fewest. What the others have they keep: it may be computed."""
        if not self.slots_per_step:
            return
        there = {process_of(replica_id) for replica_id in participants}
        owned = Counter(map(process_of, self.pending.values()))
        deal = dict(self.pending)
        for slot, owner in self.pending.items():
            if process_of(owner) not in there:
                deal[slot] = heir = min(participants, key=lambda replica_id: owned[process_of(replica_id)])
                owned[process_of(heir)] += 1
        self.pending = deal

    @property
    def deal_id(self) -> str:
        """Equal names, equal deals, given equal ledgers. Empty: there is no open deal."""
        return _deal_id(tuple(self.pending), tuple(self.pending.values())) if self.pending else ""

    def drop(self) -> None:
        """Returns the open deal: all its slots, as if they had never been dealt."""
        self.pending = {}

    def commit(self, tokens: Sequence[float], *, skip: bool = False) -> LedgerEntry:
        """`tokens`: for each slot of the open deal, in its order, the valid tokens that went in; 0: none; UNABLE: none, and its group
        said that it cannot. skip: a slot that was unable too often is left out for good."""
        assert len(tokens) == len(self.pending), f"{len(tokens)} figures for {len(self.pending)} slots"
        slots = list(self.pending)
        given = tuple([slot for slot, count in zip(slots, tokens, strict=True) if count > 0])
        contributed = set(given)
        if UNABLE in tokens:
            for slot, count in zip(slots, tokens, strict=True):
                if count == UNABLE:
                    self.unable[slot] = self.unable.get(slot, 0) + 1
        worn = {slot for slot, times in self.unable.items() if times >= MAX_UNABLE} - contributed
        useless = tuple(slot for slot in slots if slot in worn) if worn else ()
        gone = contributed | (set(useless) if skip else set())
        self.skipped += useless if skip else ()
        self.position = max(self.position, max(slots, default=-self.slot_size) + self.slot_size)
        self.holes = sorted({*self.holes, *slots} - gone)
        self.unable = {slot: count for slot, count in self.unable.items() if slot not in gone}
        self.pending = {}
        return LedgerEntry(given, tuple([slot for slot in slots if slot not in gone]), useless)

    def state_dict(self) -> dict[str, Any]:
        """JSON. With the open deal: whoever heals from it must continue it."""
        return {
            "slot_size": self.slot_size,
            "position": self.position,
            "holes": list(self.holes),
            "unable": [[slot, count] for slot, count in sorted(self.unable.items())],
            "skipped": list(self.skipped),
            "pending": [[slot, replica_id] for slot, replica_id in self.pending.items()],
        }

    def load_state_dict(self, state: dict[str, Any], *, keep_deal: bool = True) -> None:
        """keep_deal=False for a checkpoint: who was dealt what then is of no use now.

        Raises ValueError when the size of a slot has changed and open holes cannot be cut to it.
        """
        old, holes = int(state.get("slot_size", self.slot_size)), [int(slot) for slot in state.get("holes", ())]
        if holes and old % self.slot_size:
            raise ValueError(
                f"training.local_batch_size: a slot of {self.slot_size} sequences does not divide the {len(holes)} open ones of {old}; "
                f"nearest: {_nearest_divisor(old, self.slot_size)} sequences per group"
            )
        self.position = int(state["position"])
        self.holes = sorted(slot + part for slot in holes for part in range(0, old, self.slot_size))
        same = old == self.slot_size
        self.unable = {int(slot): int(count) for slot, count in state.get("unable", ())} if same else {}
        self.skipped = [int(slot) for slot in state.get("skipped", ())]
        open_deal = state.get("pending", ()) if keep_deal and same else ()
        self.pending = {int(slot): str(replica_id) for slot, replica_id in open_deal}


@lru_cache(64)  # the same for all ranks that a process drives
def _deal_id(slots: tuple[int, ...], owners: tuple[str, ...]) -> str:
    text = "/".join(f"{slot} {replica_id}" for slot, replica_id in zip(slots, owners, strict=True))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))
