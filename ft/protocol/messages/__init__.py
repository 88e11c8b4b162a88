"""Messages of the protocol: what machines are told (events), what they want done (effects), and what travels between them.

Each machine has one entry, `handle(event, now_s) -> Out`. It never waits, and never asks for the time: `now_s` is the driver's monotonic
clock. The driver carries out `Out.effects` in order, as the class of each effect says, and may log `Out.reason` when it changes.

    Trainer's rank:  step.Step   <- begin, sums, plans, outcomes, notices        -> configure, reduce, vote, commit
    Group's server:  group.Group <- its ranks' calls and votes, the lighthouse   -> the lighthouse, answers to ranks
    Lighthouse:      lighthouse.Lighthouse <- calls, streams, beats, ticks       -> answers, refusals, notices
"""

from ft.protocol.messages.group import *  # noqa: F403
from ft.protocol.messages.lighthouse import *  # noqa: F403
from ft.protocol.messages.quorum import *  # noqa: F403
from ft.protocol.messages.step import *  # noqa: F403
