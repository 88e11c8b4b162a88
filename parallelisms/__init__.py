"""Parallelism within one replica group: one file per technique; parallelize.py applies them in order."""
