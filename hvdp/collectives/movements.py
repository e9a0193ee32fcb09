"""allgather, broadcast and alltoall: values that move and do not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdp._core import objects, submit
from hvdp._core.arrays import Array
from hvdp._core.handles import Handle
from hvdp._core.operation import Operation
from hvdp._core.ops import Kind, Sum
from hvdp._core.runtime import runtime
from hvdp.collectives.tensors import Build, OnTensors, T, gradient_name
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
        return self._differentiable(
            lambda values: [
                submit.at_once(self._one(Kind.ALLGATHER, values[0], name, process_set, self._gathered))
            ],
            lambda gradients: self._own_rows([tensor], gradients, gradient_name(name), process_set),
            [tensor],
        )[0]

    def allgather_async(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """`allgather` that returns a handle."""
        return submit.alone(self._one(Kind.ALLGATHER, tensor, name, process_set, self._gathered))

    def grouped_allgather(
        self, tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[T]:
        """`allgather` of several tensors at once."""
        return self._differentiable(
            lambda values: self.grouped_allgather_async(values, name, process_set).wait(),
            lambda gradients: self._own_rows(tensors, gradients, gradient_name(name), process_set),
            list(tensors),
        )

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

        def backward(gradients: list[T]) -> list[T]:
            (total,) = self._summed(gradients, gradient_name(name), process_set)
            if root_rank != runtime.require("rank").rank:
                total[...] = 0
            return [self._tensors.made(total, gradients[0])]

        def forward(values: list[T]) -> list[T]:
            build = self._sent(root_rank)
            return [submit.at_once(self._one(Kind.BROADCAST, values[0], name, process_set, build))]

        return self._differentiable(forward, backward, [tensor])[0]

    def broadcast_async(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """`broadcast` that returns a handle; `tensor` may be reused at once."""
        build = self._sent(root_rank)
        return submit.alone(self._one(Kind.BROADCAST, tensor, name, process_set, build))

    def broadcast_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """`broadcast` in place."""
        build = self._sent_in_place(root_rank)
        result: T = submit.at_once(self._one(Kind.BROADCAST, tensor, name, process_set, build))
        return result

    def broadcast_async_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """`broadcast_` that returns a handle."""
        build = self._sent_in_place(root_rank)
        return submit.alone(self._one(Kind.BROADCAST, tensor, name, process_set, build))

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
        received: list[T] = []

        def forward(values: list[T]) -> list[T]:
            build = self._exchanged(splits)
            result = submit.at_once(self._one(Kind.ALLTOALL, values[0], name, process_set, build))
            if splits is None:
                return [result]
            received[:] = [result[1]]
            return [result[0]]

        def backward(gradients: list[T]) -> list[T]:
            back = self.alltoall_async(
                gradients[0], received[0] if received else None, gradient_name(name), process_set
            ).wait()
            return [back[0] if received else back]

        (rows,) = self._differentiable(forward, backward, [tensor])
        return (rows, received[0]) if received else rows

    def alltoall_async(
        self,
        tensor: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """`alltoall` that returns a handle."""
        return submit.alone(self._one(Kind.ALLTOALL, tensor, name, process_set, self._exchanged(splits)))

    def _sent(self, root_rank: int) -> Build[T]:
        def build(tensor: T, options: submit.Options) -> Operation:
            operation = submit.broadcast(self._tensors.copied(tensor), root_rank, options)
            operation.handle.then(lambda out: self._tensors.made(out, tensor))
            return operation

        return build

    def _sent_in_place(self, root_rank: int) -> Build[T]:
        def build(tensor: T, options: submit.Options) -> Operation:
            operation = submit.broadcast(self._tensors.writable(tensor), root_rank, options)
            operation.handle.then(lambda out: self._tensors.written(tensor, out))
            return operation

        return build

    def _exchanged(self, splits: Any) -> Build[T]:
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

        return build

    def _summed(self, gradients: Sequence[T], name: str | None, process_set: ProcessSet) -> list[Array]:
        options = self._options(gradients[0], name, process_set)
        arrays = [self._tensors.copied(gradient) for gradient in gradients]
        submit.grouped(
            [
                submit.allreduce(array, Sum, 1.0, 1.0, options.numbered(index))
                for index, array in enumerate(arrays)
            ]
        ).wait()
        return arrays

    def _own_rows(
        self, tensors: Sequence[T], gradients: Sequence[T], name: str | None, process_set: ProcessSet
    ) -> list[T]:
        """The gradient of allgather: this rank's rows of the sum of all ranks' gradients."""
        shapes = [self._tensors.shared(tensor).shape for tensor in tensors]
        rows = [shape[0] if shape else 1 for shape in shapes]
        own = process_set.rank()
        # With their ranks: those that have joined have no rows, and say nothing.
        of_all = objects.allgather_object((own, rows), None, process_set.number())
        results = []
        for index, total in enumerate(self._summed(gradients, name, process_set)):
            start = sum(theirs[index] for rank, theirs in of_all if rank < own)
            mine = total[start : start + rows[index]].reshape(shapes[index])
            results.append(self._tensors.made(mine, gradients[index]))
        return results

    def _gathered(self, tensor: T, options: submit.Options) -> Operation:
        operation = submit.allgather(self._tensors.shared(tensor), options)
        operation.handle.then(lambda out: self._tensors.made(out, tensor))
        return operation
