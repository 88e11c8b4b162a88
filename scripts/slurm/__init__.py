"""The program behind scripts/slurm/train.sbatch."""
