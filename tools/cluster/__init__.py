"""The parts of scripts/check_cluster.py: measurements of each rank, findings, and their report."""
