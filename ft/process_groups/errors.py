"""Errors of process groups. All are RuntimeErrors; the message is the cause."""

from __future__ import annotations


class ProcessGroupError(RuntimeError):
    """An operation or a process group has failed; the group is unusable until it is configured again."""


class Abandoned(ProcessGroupError):
    """The generation was ended by this process: by `abandon`, `shutdown`, `configure`, or `interrupt`."""


class RendezvousFailed(ProcessGroupError):
    """The process group has not formed. `absent`: ranks that are known not to have joined. `mismatched`: ranks whose fingerprint is not the
    job's; the same on all members, none of which has connected to any other."""

    def __init__(self, message: str, absent: tuple[int, ...] = (), mismatched: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.absent, self.mismatched = absent, mismatched


class MustExit(ProcessGroupError):
    """Abandoned generations have not ended, and keep memory and sockets: this process must exit instead of forming a further one."""
