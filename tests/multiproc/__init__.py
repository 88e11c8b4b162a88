"""Tests that need several ranks, run on pooled gloo workers (pool.py)."""
