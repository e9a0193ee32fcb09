"""allgather, broadcast and alltoall: values that move and do not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdp._core import submit
from hvdp._core.arrays import Array
from hvdp._core.handles import Handle
from hvdp._core.operation import Operation
from hvdp._core.ops import Kind
from hvdp.collectives.tensors import OnTensors, T
from hvdp.process_sets import ProcessSet, global_process_set

__all__ = ["Movements"]


class Movements(OnTensors[T]):
    def allgather(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """All members' tensors joined along the first dimension, in rank order.

        First dimensions may differ between ranks (0 is allowed), the others may not; a
        scalar counts as a tensor of one.
        """
        result: T = self.allgather_async(tensor, name, process_set).wait()
        return result

    def allgather_async(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """`allgather` that returns a handle."""
        options = self._options(tensor, name, process_set)
        return submit.alone(self._one(Kind.ALLGATHER, tensor, options, self._gathered))

    def grouped_allgather(
        self, tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[T]:
        """`allgather` of several tensors at once."""
        results: list[T] = self.grouped_allgather_async(tensors, name, process_set).wait()
        return results

    def grouped_allgather_async(
        self, tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """`grouped_allgather` that returns one handle."""
        return submit.grouped(self._each(Kind.ALLGATHER, tensors, name, process_set, self._gathered))

    def broadcast(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """The values of `root_rank`, a global rank, in a new tensor.

        On the other members `tensor` only gives shape and dtype.
        """
        result: T = self.broadcast_async(tensor, root_rank, name, process_set).wait()
        return result

    def broadcast_async(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """`broadcast` that returns a handle; `tensor` may be reused at once."""

        def build(tensor: T, options: submit.Options) -> Operation:
            operation = submit.broadcast(self._tensors.copied(tensor), root_rank, options)
            operation.handle.then(lambda out: self._tensors.made(out, tensor))
            return operation

        return submit.alone(
            self._one(Kind.BROADCAST, tensor, self._options(tensor, name, process_set), build)
        )

    def broadcast_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """`broadcast` in place."""
        result: T = self.broadcast_async_(tensor, root_rank, name, process_set).wait()
        return result

    def broadcast_async_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """`broadcast_` that returns a handle."""

        def build(tensor: T, options: submit.Options) -> Operation:
            operation = submit.broadcast(self._tensors.writable(tensor), root_rank, options)
            operation.handle.then(lambda out: self._tensors.written(tensor, out))
            return operation

        return submit.alone(
            self._one(Kind.BROADCAST, tensor, self._options(tensor, name, process_set), build)
        )

    def alltoall(
        self,
        tensor: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Send rows to every member, and receive rows from every member, in member order.

        Args:
            splits: how many rows go to each member, integers that add up to the first
                dimension; None cuts it evenly.

        Returns:
            The received rows; where `splits` is given, a pair of them and an int64 tensor of
            how many came from each member.
        """
        return self.alltoall_async(tensor, splits, name, process_set).wait()

    def alltoall_async(
        self,
        tensor: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """`alltoall` that returns a handle."""
        wanted = splits.tolist() if hasattr(splits, "tolist") else splits

        def build(tensor: T, options: submit.Options) -> Operation:
            operation = submit.alltoall(self._tensors.shared(tensor), wanted, options)

            def finish(result: tuple[Array, list[int]]) -> Any:
                rows = self._tensors.made(result[0], tensor)
                if splits is None:
                    return rows
                return rows, self._tensors.made(np.array(result[1], np.int64), tensor)

            operation.handle.then(finish)
            return operation

        return submit.alone(self._one(Kind.ALLTOALL, tensor, self._options(tensor, name, process_set), build))

    def _gathered(self, tensor: T, options: submit.Options) -> Operation:
        operation = submit.allgather(self._tensors.shared(tensor), options)
        operation.handle.then(lambda out: self._tensors.made(out, tensor))
        return operation
