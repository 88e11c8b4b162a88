"""The rules of fault tolerance, pure: events and `now_s` go in, effects and a reason come out. Standard library only.

Read in this order: messages.py (events and effects), rules.py (which members continue together), lighthouse.py (forms quorums) with
roster.py (the live ids) and quorum_record.py (the history of a quorum), group.py (the ranks of a group
decide as one), step.py (a rank's step, from begin to commit, and the ledger of samples) with compare.py (whose weights differ)."""
