"""The fault-tolerance protocol as pure state machines: `handle(event, now_s)` returns effects and a reason. Standard library only.

Reading order: messages.py (events and effects), rules.py (which members continue together), lighthouse.py (forms quorums) with
roster.py (live ids) and quorum_record.py (history of a quorum), group.py (the ranks of a replica group
decide as one), step.py (a rank's step, from begin to commit, and the ledger of samples) with compare.py (comparison of weights)."""
