"""MPI through mpi4py: any MPI library, between any hosts.

Data moves by non-blocking MPI calls, so that a dead peer never holds this process: between
looks at the request the engine hears from the control plane. (MPI makes and frees the communicator
of a process set by blocking calls alone.) Floating-point and plain
integer reductions are MPI's own; what MPI has no type or exact rule for (16-bit floats,
bools, integer averages, Min and Max of floats) is exchanged as bytes by shards and reduced by
the common kernels.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from hvdp._core.arrays import Array, as_bytes
from hvdp._core.kernels import reduce_into
from hvdp._core.ops import Average, Max, Min, Product, Reduction, Sum
from hvdp._core.process_sets import Group
from hvdp.errors import TransportError
from hvdp.transports.base import Transport

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiTransport", "start_mpi"]

_EAGER_SECONDS = 0.2
_SLOWEST_BYTES_PER_SECOND = 50e6
_PAUSE_SECONDS = 0.0002
_NOT_MPI_TYPES = (np.dtype(bool), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_failed = False


def start_mpi(rank: int, size: int) -> Any:
    """Import mpi4py and start MPI if nobody has; returns the `mpi4py.MPI` module.

    Raises:
        TransportError: MPI is missing, or sees other processes than the launcher told of.
    """
    try:
        import mpi4py

        ours = "mpi4py.MPI" not in sys.modules
        if ours:
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            f"MPI cannot be used on rank {rank}: {error}. Install it with: pip install 'hvdp[mpich]'"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        if ours:
            atexit.register(_finalize, MPI, os.getpid())
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise TransportError(
            f"MPI was started on rank {rank} without thread support; leave MPI_Init to hvd.init(), "
            "or call MPI.Init_thread(MPI.THREAD_MULTIPLE) before it."
        )
    world = MPI.COMM_WORLD
    if world.Get_size() != size or world.Get_rank() != rank:
        raise TransportError(
            f"MPI sees this process as rank {world.Get_rank()} of {world.Get_size()}, the launcher as rank "
            f"{rank} of {size}. Start with mpiexec or horovodrun --mpi of the MPI that mpi4py uses "
            f"({MPI.Get_library_version().splitlines()[0]})."
        )
    return MPI


def _finalize(MPI: Any, pid: int) -> None:
    """At exit: MPI_Finalize waits for all ranks, so it is skipped once one of them is gone.

    A forked child is no rank, and would end MPI for its parent.
    """
    if not _failed and pid == os.getpid() and not MPI.Is_finalized():
        MPI.Finalize()


class MpiTransport(Transport):
    """Args: comm: a communicator of its own, in which this process's number is its rank."""

    name = "mpi"
    order_free = False

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        super().__init__()
        self._MPI = MPI
        self._world = comm
        self._comms: dict[int, MPI.Intracomm] = {}
        self._ops = {Sum: MPI.SUM, Average: MPI.SUM, Min: MPI.MIN, Max: MPI.MAX, Product: MPI.PROD}

    def _comm(self, group: Group) -> Any:
        comm = self._comms.get(group.number)
        if comm is None:
            members = self._world.Get_group().Incl(list(group.ranks))
            comm = self._comms[group.number] = self._world.Create_group(members, tag=group.number % 32767)
        return comm

    def _wait(self, request: Any, nbytes: int) -> None:
        """Drive the request; MPI moves data only inside its calls, so look often at first."""
        global _failed
        start = time.perf_counter()
        eager = start + _EAGER_SECONDS + nbytes / _SLOWEST_BYTES_PER_SECOND
        looked = start
        try:
            while not request.Test():
                now = time.perf_counter()
                if now > eager:
                    self.pause(_PAUSE_SECONDS)
                elif now > looked + 0.01:
                    looked = now
                    self.pause(0)
                else:
                    os.sched_yield()
        except BaseException:
            _failed = True
            raise

    def _is_native(self, data: Array, reduction: Reduction) -> bool:
        """Whether MPI has the type, and does to it all that is asked; its Min and Max lose a NaN."""
        if data.dtype in _NOT_MPI_TYPES:
            return False
        if data.dtype.kind in "iu":
            return reduction.op is not Average and reduction.prescale == reduction.postscale == 1.0
        return reduction.op not in (Min, Max)

    def _scaled(self, group: Group, data: Array, reduction: Reduction) -> Array:
        """In place. Divided before the sum, an average cannot overflow inside MPI."""
        if reduction.weights is not None:
            weight = reduction.weights[group.index]
            if not weight:
                data[...] = 0
            return _scale(data, weight)
        if group.index in reduction.absent:
            return data
        return _scale(data, reduction.prescale / (reduction.divisor if reduction.op is Average else 1))

    def allreduce(self, group: Group, data: Array, reduction: Reduction) -> None:
        if not self._is_native(data, reduction):
            self._allreduce_by_shards(group, data, reduction)
            return
        self._scaled(group, data, reduction)
        op = self._ops[reduction.op]
        self._wait(self._comm(group).Iallreduce(self._MPI.IN_PLACE, data, op), data.nbytes)
        _scale(data, reduction.postscale)

    def _allreduce_by_shards(self, group: Group, data: Array, reduction: Reduction) -> None:
        step = -(-data.size // group.size)
        counts = [max(0, min(step, data.size - index * step)) for index in range(group.size)]
        shard = np.empty(counts[group.index], data.dtype)
        reduce_into(shard, self._gather_shards(group, data, counts), reduction)
        self.allgather(group, as_bytes(shard), as_bytes(data), [count * data.itemsize for count in counts])

    def _gather_shards(self, group: Group, data: Array, counts: Sequence[int]) -> list[Array]:
        """All members' items of this member's shard, in member order."""
        shards = np.empty((group.size, counts[group.index]), data.dtype)
        nbytes = [count * data.itemsize for count in counts]
        self.alltoall(group, as_bytes(data), as_bytes(shards), [nbytes] * group.size)
        return list(shards)

    def broadcast(self, group: Group, data: Array, root: int) -> None:
        self._wait(self._comm(group).Ibcast(data, root), data.nbytes)

    def allgather(self, group: Group, data: Array, out: Array, counts: Sequence[int]) -> None:
        self._wait(self._comm(group).Iallgatherv(data, [out, list(counts)]), out.nbytes)

    def alltoall(self, group: Group, data: Array, out: Array, counts: Sequence[Sequence[int]]) -> None:
        received = [row[group.index] for row in counts]
        request = self._comm(group).Ialltoallv([data, list(counts[group.index])], [out, received])
        self._wait(request, data.nbytes + out.nbytes)

    def reducescatter(
        self, group: Group, data: Array, out: Array, counts: Sequence[int], reduction: Reduction
    ) -> None:
        if not self._is_native(data, reduction):
            reduce_into(out, self._gather_shards(group, data, counts), reduction)
            return
        data = self._scaled(group, data.copy(), reduction)
        op = self._ops[reduction.op]
        self._wait(self._comm(group).Ireduce_scatter(data, out, list(counts), op), data.nbytes)
        _scale(out, reduction.postscale)

    def forget(self, group: Group) -> None:
        comm = self._comms.pop(group.number, None)
        if comm is not None:
            comm.Free()

    def barrier(self, group: Group) -> None:
        self._wait(self._comm(group).Ibarrier(), 0)

    def close(self) -> None:
        global _failed
        _failed = _failed or self.broken
        if not _failed and not self._MPI.Is_finalized():
            with contextlib.suppress(self._MPI.Exception):
                for comm in [*self._comms.values(), self._world]:
                    comm.Free()


def _scale(data: Array, factor: float) -> Array:
    if factor != 1.0:
        np.multiply(data, data.dtype.type(factor), out=data)
    return data
