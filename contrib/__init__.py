"""Integrations with other systems: Hugging Face, Kubernetes, TorchX."""
