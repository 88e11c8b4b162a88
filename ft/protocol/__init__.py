"""The rules of fault tolerance, pure: events and `now_s` go in, effects and a reason in words come out. Standard library only.

Read in this order: messages.py (the words), lighthouse.py (who is in), plan.py (what each does), group.py (the ranks of a group decide
as one), step.py (a rank's step, from begin to commit), ledger.py (every sample exactly once).
"""
