"""torchft.ddp, under its name."""

from ft.compat.wrappers import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
