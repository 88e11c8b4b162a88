"""How a group fails. All are RuntimeErrors, with the cause in words."""

from __future__ import annotations


class ProcessGroupError(RuntimeError):
    """An operation or a group failed; the group is of no use until it is configured again."""


class Abandoned(ProcessGroupError):
    """Ended by this member itself: by `abandon`, `shutdown`, `configure`, or `interrupt` after a notice."""


class RendezvousFailed(ProcessGroupError):
    """The group did not form. `absent`: the ranks that had not come, as far as is known. `mismatched`: those whose fingerprint is not the
    job's; the same at all members, none of which has connected to any other."""

    def __init__(self, message: str, absent: tuple[int, ...] = (), mismatched: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.absent, self.mismatched = absent, mismatched


class MustExit(ProcessGroupError):
    """Too many generations of the past have not ended: this process cannot be trusted to form another one, and has to exit."""
