"""The optimizer that steps on the gradients of all ranks."""

from hvdp.torch import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
