"""Ways in and out of other systems: Hugging Face, Kubernetes, TorchX."""
