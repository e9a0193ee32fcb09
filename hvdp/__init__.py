"""hvdp: data-parallel training for today's frameworks, the Horovod way.

This module is the framework-neutral API on NumPy arrays; `hvdp.torch` is the same on
PyTorch tensors, with a DistributedOptimizer.
"""

from hvdp._core.ops import Adasum, Average, Max, Min, Product, Sum
from hvdp._version import __version__
from hvdp.basics import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hvdp.collectives import (
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    poll,
    synchronize,
)
from hvdp.errors import HorovodInternalError, HvdpError, MismatchError

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "HvdpError",
    "Max",
    "Min",
    "MismatchError",
    "Product",
    "Sum",
    "__version__",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]
