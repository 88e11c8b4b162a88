"""torchft.data, under its name."""

from ft.compat.wrappers import DistributedSampler

__all__ = ["DistributedSampler"]
