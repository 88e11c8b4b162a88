"""Implementation of scripts/hf.py: converts published weights to checkpoints and back."""
