"""What scripts/slurm/train.sbatch becomes."""
