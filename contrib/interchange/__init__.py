"""The parts of scripts/hf.py: published weights to checkpoints and back."""
