"""The parts of scripts/check_cluster.py: what each rank measures, what is made of it, and how it is told."""
