"""hvdp: data-parallel training for today's frameworks, the Horovod way.

This module is the framework-neutral API on NumPy arrays; `hvdp.torch` is the same on
PyTorch tensors, with a DistributedOptimizer.
"""

from hvdp import metrics as metrics
from hvdp._core.ops import Adasum, Average, Max, Min, Product, Sum
from hvdp._numpy import Compression
from hvdp._numpy import collectives as _collectives
from hvdp._version import __version__
from hvdp.basics import (
    cross_rank,
    cross_size,
    cuda_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from hvdp.collectives import allgather_object, barrier, broadcast_object, join, poll, synchronize
from hvdp.errors import HorovodInternalError, HvdpError, MismatchError
from hvdp.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvdp.sharding import shard
from hvdp.timeline import start_timeline, stop_timeline

allgather = _collectives.allgather
allgather_async = _collectives.allgather_async
allreduce = _collectives.allreduce
allreduce_ = _collectives.allreduce_
allreduce_async = _collectives.allreduce_async
allreduce_async_ = _collectives.allreduce_async_
alltoall = _collectives.alltoall
alltoall_async = _collectives.alltoall_async
broadcast = _collectives.broadcast
broadcast_ = _collectives.broadcast_
broadcast_async = _collectives.broadcast_async
broadcast_async_ = _collectives.broadcast_async_
grouped_allgather = _collectives.grouped_allgather
grouped_allgather_async = _collectives.grouped_allgather_async
grouped_allreduce = _collectives.grouped_allreduce
grouped_allreduce_ = _collectives.grouped_allreduce_
grouped_allreduce_async = _collectives.grouped_allreduce_async
grouped_allreduce_async_ = _collectives.grouped_allreduce_async_
grouped_reducescatter = _collectives.grouped_reducescatter
grouped_reducescatter_async = _collectives.grouped_reducescatter_async
reducescatter = _collectives.reducescatter
reducescatter_async = _collectives.reducescatter_async

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "HvdpError",
    "Max",
    "Min",
    "MismatchError",
    "ProcessSet",
    "Product",
    "Sum",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shard",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
