"""Tests; run by scripts/run_tests.sh."""
