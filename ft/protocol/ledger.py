"""Which samples are trained on when, each exactly once."""

from __future__ import annotations

from typing import Any


class Ledger:
    def __init__(self, slot_size: int) -> None:
        raise NotImplementedError

    def deal(self, participants: tuple[str, ...]) -> dict[int, str]:
        """{slot: replica_id} of the coming step. An open deal is kept."""
        raise NotImplementedError

    def commit(self, tokens: tuple[float, ...]) -> None:
        """`tokens`: the tail's figure for each slot of the open deal, in the order of its slots."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError
