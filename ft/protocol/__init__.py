"""The rules of fault tolerance, pure: events and `now_s` go in, effects and a reason in words come out. Standard library only.

Read in this order: messages/ (what is said), rules.py (which members go on together), lighthouse.py (which are in the quorum) with
roster.py (which are there) and generation.py (what has happened to a quorum), plan.py (what each does), group.py (the ranks of a group
decide as one), step.py (a rank's step, from begin to commit) with compare.py (whose weights differ), and ledger.py (every sample exactly
once)."""
