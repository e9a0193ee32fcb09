"""allreduce, single and grouped."""

from __future__ import annotations

from collections.abc import Sequence

from hvdp._core import submit
from hvdp._core.compression import Compressor
from hvdp._core.handles import Handle
from hvdp._core.operation import Operation
from hvdp._core.ops import Kind, ReduceOp
from hvdp.collectives.tensors import Build, OnTensors, T, gradient_name, no_compression
from hvdp.process_sets import ProcessSet, global_process_set

__all__ = ["Reductions"]


class Reductions(OnTensors[T]):
    def allreduce(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        compression: Compressor = no_compression,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Reduce over the members into a new tensor of the same shape and dtype.

        Args:
            average: the older way to say `op`: True is Average, False is Sum.
            compression: how the values travel: Compression.none, .fp16 or .bf16.
            op: Average (default), Sum, Min, Max, Product or Adasum.
            prescale_factor, postscale_factor: each rank's values are multiplied before, the
                result after.
        """
        factors = (prescale_factor, postscale_factor)

        def forward(values: list[T]) -> list[T]:
            build = self._new(average, op, *factors)
            return [submit.at_once(self._one(Kind.ALLREDUCE, values[0], name, process_set, build))]

        def backward(gradients: list[T]) -> list[T]:
            build = self._new(None, ReduceOp.linear(average, op), *factors)
            label = gradient_name(name)
            return [submit.at_once(self._one(Kind.ALLREDUCE, gradients[0], label, process_set, build))]

        return self._through(compression, [tensor], forward, backward)[0]

    def allreduce_async(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """`allreduce` that returns a handle; `tensor` may be reused at once."""
        build = self._new(average, op, prescale_factor, postscale_factor)
        return submit.alone(self._one(Kind.ALLREDUCE, tensor, name, process_set, build))

    def allreduce_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """`allreduce` in place."""
        build = self._in_place(average, op, prescale_factor, postscale_factor)
        result: T = submit.at_once(self._one(Kind.ALLREDUCE, tensor, name, process_set, build))
        return result

    def allreduce_async_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """`allreduce_` that returns a handle."""
        build = self._in_place(average, op, prescale_factor, postscale_factor)
        return submit.alone(self._one(Kind.ALLREDUCE, tensor, name, process_set, build))

    def grouped_allreduce(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        compression: Compressor = no_compression,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[T]:
        """`allreduce` of several tensors at once, which saves time where they are small."""
        rest = (prescale_factor, postscale_factor, process_set)
        return self._through(
            compression,
            tensors,
            lambda values: self.grouped_allreduce_async(values, average, name, op, *rest).wait(),
            lambda gradients: self.grouped_allreduce_async(
                gradients, None, gradient_name(name), ReduceOp.linear(average, op), *rest
            ).wait(),
        )

    def grouped_allreduce_async(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """`grouped_allreduce` that returns one handle; the tensors may be reused at once."""
        build = self._new(average, op, prescale_factor, postscale_factor)
        return submit.grouped(self._each(Kind.ALLREDUCE, tensors, name, process_set, build))

    def grouped_allreduce_(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[T]:
        """`grouped_allreduce` in place."""
        results: list[T] = self.grouped_allreduce_async_(
            tensors, average, name, op, prescale_factor, postscale_factor, process_set
        ).wait()
        return results

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """`grouped_allreduce_` that returns one handle."""
        build = self._in_place(average, op, prescale_factor, postscale_factor)
        return submit.grouped(self._each(Kind.ALLREDUCE, tensors, name, process_set, build))

    def _new(self, average: bool | None, op: int | None, prescale: float, postscale: float) -> Build[T]:
        def build(tensor: T, options: submit.Options) -> Operation:
            data = self._tensors.copied(tensor)
            operation = submit.allreduce(data, ReduceOp.resolve(average, op), prescale, postscale, options)
            operation.handle.then(lambda _: self._tensors.made(data, tensor))
            return operation

        return build

    def _in_place(self, average: bool | None, op: int | None, prescale: float, postscale: float) -> Build[T]:
        def build(tensor: T, options: submit.Options) -> Operation:
            data = self._tensors.writable(tensor)
            operation = submit.allreduce(data, ReduceOp.resolve(average, op), prescale, postscale, options)
            operation.handle.then(lambda _: self._tensors.written(tensor, data))
            return operation

        return build
