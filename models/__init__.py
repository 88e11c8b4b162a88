"""Models: architecture, initialisation and cost. Imports torch and nothing else."""
