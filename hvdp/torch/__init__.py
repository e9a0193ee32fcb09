"""hvdp on PyTorch: `import hvdp.torch as hvd` in place of `import horovod.torch as hvd`."""

from hvdp import (
    Adasum,
    Average,
    HorovodInternalError,
    HvdpError,
    Max,
    Min,
    MismatchError,
    ProcessSet,
    Product,
    Sum,
    __version__,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    cross_rank,
    cross_size,
    cuda_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    synchronize,
)
from hvdp.torch import metrics
from hvdp.torch._kernels import lend as _lend_kernels
from hvdp.torch.buffers import average_buffers
from hvdp.torch.collectives import Compression
from hvdp.torch.collectives import collectives as _collectives
from hvdp.torch.consistency import check_consistency
from hvdp.torch.optimizer import DistributedOptimizer
from hvdp.torch.sharding import shard
from hvdp.torch.sparse import sparse_allreduce_async
from hvdp.torch.state import broadcast_optimizer_state, broadcast_parameters
from hvdp.torch.sync_batch_norm import SyncBatchNorm
from hvdp.torch.warmup import WarmupLR

_lend_kernels()

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
    "DistributedOptimizer",
    "HorovodInternalError",
    "HvdpError",
    "Max",
    "Min",
    "MismatchError",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "WarmupLR",
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
    "average_buffers",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_consistency",
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
    "metrics",
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
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
