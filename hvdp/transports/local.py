"""A world of one: nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

from hvdp._core.arrays import Array
from hvdp._core.kernels import reduce_into
from hvdp._core.offers import LINE_WORDS
from hvdp._core.ops import Reduction
from hvdp._core.process_sets import Group
from hvdp.transports.base import Transport

__all__ = ["LocalTransport"]


class LocalTransport(Transport):
    name = "local"

    def board(self) -> memoryview:
        return memoryview(bytearray(8 * LINE_WORDS)).cast("Q")

    def allreduce(self, group: Group, data: Array, reduction: Reduction) -> None:
        if reduction.prescale != 1.0 or reduction.postscale != 1.0:
            reduce_into(data, [data], reduction)

    def broadcast(self, group: Group, data: Array, root: int) -> None:
        pass

    def allgather(self, group: Group, data: Array, out: Array, counts: Sequence[int]) -> None:
        out[...] = data

    def alltoall(self, group: Group, data: Array, out: Array, counts: Sequence[Sequence[int]]) -> None:
        out[...] = data

    def reducescatter(
        self, group: Group, data: Array, out: Array, counts: Sequence[int], reduction: Reduction
    ) -> None:
        reduce_into(out, [data], reduction)

    def barrier(self, group: Group) -> None:
        pass

    def close(self) -> None:
        pass
