"""A rank's calls to its group's server: repeated for as long as it takes; a missing answer is never taken for a no."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ft.membership import ReplicaGroupConfig
from ft.protocol import messages as m
from ft.rpc.clients import GroupClient, NameTaken, Refused, Stale
from ft.seam import BadInput, GroupEnded

if TYPE_CHECKING:
    from ft.agreement import Agreement

ASK_S = 30.0  # one try of a call for a quorum
VOTE_S, VOTE_TRIES = 30.0, 10
WHOLE_VOTE_S = 2.0  # the vote of all ranks together: while it waits, they stand in a collective
WORD_S = 3.0  # three beats: how long a word of the server counts
SAID_S = 10.0  # what is waited for is said first after this, then
SAID_EVERY_S = 60.0
GONE_S = 2.0  # after a call failed, until it is known whether the server is gone
log = logging.getLogger("pharos.manager")


class ServersWord:
    """The group server's word on the group as a whole: it waits for others, and none of its ranks is late. Any thread may ask."""

    def __init__(self, group_rank: int) -> None:
        self._group_rank = group_rank
        self._say_at_s = SAID_S  # into the wait
        self._waited_s = 0.0
        self.heard_s = -math.inf  # time.monotonic() of the newest

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self.heard_s <= WORD_S

    def hear(self, waits: m.Waits) -> None:
        """In the stream's thread. Rank 0 says it for all, once a minute."""
        self.heard_s = time.monotonic()
        if waits.waited_s < self._waited_s:
            self._say_at_s = SAID_S
        self._waited_s = waits.waited_s
        if self._group_rank == 0 and waits.waited_s >= self._say_at_s:
            self._say_at_s = waits.waited_s - waits.waited_s % SAID_EVERY_S + SAID_EVERY_S
            log.info("waiting for %.0f s: %s", waits.waited_s, waits.reason)

    def all_are_there(self) -> None:
        """A question of all its ranks was answered."""
        self.heard_s = time.monotonic()


class GroupCalls:
    """`gone` is set by whoever watches the server, once it is. `agreement`: among the ranks of this group, if there are several."""

    def __init__(
        self,
        client: GroupClient,
        config: ReplicaGroupConfig,
        gone: threading.Event,
        word: ServersWord,
        agreement: Agreement | None = None,
    ) -> None:
        self._client, self._config, self._gone = client, config, gone
        self._word, self._agreement = word, agreement

    def quorum(self, call: m.RankCall, within_s: float | None) -> m.Event | None:
        """Returns the answer (Go: this rank is to go), or None where the server is gone: its stream says why. within_s: then it fails;
        None: never. Raises BadInput for a group that cannot take part."""
        asked_s = time.monotonic()
        while True:
            left_s = None if within_s is None else asked_s + within_s - time.monotonic()
            try:
                answer = self._client.quorum(call, ASK_S if left_s is None else max(0.01, min(left_s, ASK_S)))
                self._word.all_are_there()
                return answer
            except TimeoutError as error:
                waited_s = time.monotonic() - asked_s
                if left_s is not None and left_s <= ASK_S:
                    return m.QuorumFailed(f"none within {waited_s:g} s: {error}")
                if not self._word.is_fresh:
                    log.info("no quorum for %.0f s: other ranks of this group have yet to ask for one", waited_s)
            except Refused as error:
                timeout_s = self._config.times.heartbeat_timeout_s
                ends = (
                    isinstance(error, NameTaken) and time.monotonic() - asked_s < timeout_s
                )  # who has it may fall silent
                if not ends:
                    raise BadInput(f"group {self._config.name} cannot take part: {error}") from None
                if self._gone.wait(GONE_S):
                    return None
            except RuntimeError as error:
                return None if self._gone.wait(GONE_S) else m.QuorumFailed(str(error))

    def agreed(self, vote: m.Vote, *, able: bool) -> m.Outcome | None:
        """The group's word on a commit, as its ranks agree on it by themselves; all of them call this for the same votes. None: each is to
        ask for the `outcome`. able: this rank may wait for it here. Raises GroupEnded."""
        if self._agreement is None:
            return None
        outcome = None
        if vote.verdict == "failed":  # the first decides, and ranks that still wait for sums are told
            outcome = self.outcome(vote)
        yes = able and vote.verdict == "yes" and not vote.blame
        all_do, change = self._agreement.all_say_yes(vote.key, yes=yes, change=vote.change)
        if not all_do:
            return outcome
        if vote.group_rank == 0:
            try:
                outcome = self._client.vote(replace(vote, change=change, whole=True), WHOLE_VOTE_S)
            except RuntimeError as error:  # what it means is found out by each rank
                log.info("no outcome of the vote of all ranks on step %d: %s", vote.step, error)
            except TimeoutError:  # it is held
                pass
        if not self._agreement.told(outcome is not None and outcome.verdict == "yes"):
            return None
        return outcome or m.Outcome(
            "commit", vote.quorum_id, vote.attempt, vote.step, "yes", change, "all ranks said yes"
        )

    def outcome(self, vote: m.Vote) -> m.Outcome:
        """The group's word. A vote that the server holds, or that waits for ranks that wait for other groups, is asked for again for as
        long as it takes. Raises GroupEnded where there is none: this rank ends."""
        tries = 0
        while tries < VOTE_TRIES:
            try:
                return self._client.vote(vote, VOTE_S)
            except TimeoutError:
                if self._word.is_fresh:
                    continue
            except Stale as error:
                raise GroupEnded(f"the group has gone on without this rank: {error}") from None
            except RuntimeError as error:
                raise GroupEnded(f"the group's server does not count votes any more: {error}") from None
            tries += 1
            log.info("no outcome yet of the vote on %s of step %d", vote.kind, vote.step)
        raise GroupEnded(f"no outcome of the vote on {vote.kind} of step {vote.step} in {VOTE_S * VOTE_TRIES:g} s")
