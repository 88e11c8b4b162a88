"""torchft.optim, under its name."""

from ft.compat.wrappers import Optimizer as OptimizerWrapper

__all__ = ["OptimizerWrapper"]
