"""torchft.local_sgd, under its names."""

from ft.compat.local_sgd import DiLoCo, LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
