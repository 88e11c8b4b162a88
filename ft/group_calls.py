"""What a rank asks of its group's server: again, for as long as it takes, and an answer that does not come is never taken for a no."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

from ft.membership import Wish
from ft.protocol import messages as m
from ft.rpc.clients import GroupClient, NameTaken, Refused, Stale
from ft.seam import BadInput, GroupEnded

ASK_S = 30.0  # one try of a call for a quorum
VOTE_S, VOTE_TRIES = 30.0, 10
GONE_S = 2.0  # after a call failed, until it is known whether the server is gone
log = logging.getLogger("pharos.manager")


class GroupCalls:
    """`gone` is set by whoever watches the server, once it is."""

    def __init__(self, client: GroupClient, wish: Wish, gone: threading.Event) -> None:
        self._client, self._wish, self._gone = client, wish, gone

    def quorum(self, call: m.RankCall, within_s: float | None) -> m.Event | None:
        """What came of it; None where the server is gone, and its stream says why. within_s: then it has failed; None: never. Raises
        BadInput for a group that cannot take part."""
        asked_s = time.monotonic()
        while True:
            left_s = None if within_s is None else asked_s + within_s - time.monotonic()
            try:
                return self._client.quorum(call, ASK_S if left_s is None else max(0.01, min(left_s, ASK_S)))
            except TimeoutError as error:
                waited_s = time.monotonic() - asked_s
                if left_s is not None and left_s <= ASK_S:
                    return m.QuorumFailed(f"none within {waited_s:g} s: {error}")
                log.info("no quorum for %.0f s; /status.json of the lighthouse says what it waits for", waited_s)
            except Refused as error:
                timeout_s = self._wish.times.heartbeat_timeout_s
                ends = (
                    isinstance(error, NameTaken) and time.monotonic() - asked_s < timeout_s
                )  # who has it may fall silent
                if not ends:
                    raise BadInput(f"group {self._wish.name} cannot take part: {error}") from None
                if self._gone.wait(GONE_S):
                    return None
            except RuntimeError as error:
                return None if self._gone.wait(GONE_S) else m.QuorumFailed(str(error))

    def outcome(self, vote: m.Vote) -> m.Outcome:
        """The group's word. Raises GroupEnded where there is none: this rank ends."""
        for _ in range(VOTE_TRIES):
            with suppress(TimeoutError):
                return self._vote(vote)
            log.info("no outcome yet of the vote on %s of step %d", vote.kind, vote.step)
        raise GroupEnded(f"no outcome of the vote on {vote.kind} of step {vote.step} in {VOTE_S * VOTE_TRIES:g} s")

    def _vote(self, vote: m.Vote) -> m.Outcome:
        try:
            return self._client.vote(vote, VOTE_S)
        except TimeoutError:
            raise
        except Stale as error:
            raise GroupEnded(f"the group has gone on without this rank: {error}") from None
        except RuntimeError as error:
            raise GroupEnded(f"the group's server does not count votes any more: {error}") from None
