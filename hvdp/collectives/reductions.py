"""allreduce and reducescatter, single and grouped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdp._core import submit
from hvdp._core.compression import Compressor, NoCompressor
from hvdp._core.handles import Handle
from hvdp._core.operation import Operation
from hvdp._core.ops import Average, Kind, ReduceOp, Sum
from hvdp.collectives.tensors import Build, Map, OnTensors, T, gradient_name
from hvdp.errors import InvalidArgumentError
from hvdp.process_sets import ProcessSet, global_process_set

__all__ = ["Reductions", "no_compression"]

no_compression = NoCompressor()


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
            build = self._new(None, _linear(average, op), *factors)
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
                gradients, None, gradient_name(name), _linear(average, op), *rest
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

    def reducescatter(
        self,
        tensor: T,
        name: str | None = None,
        compression: Compressor = no_compression,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> T:
        """Reduce over the members, and return this member's rows of the result.

        The first dimension is cut in member order; where it does not divide by the number of
        members, the first ones get one row more.

        Args:
            op: as for allreduce, without Adasum.
        """
        build = self._scattered(op, prescale_factor, postscale_factor)
        return self._through(
            compression,
            [tensor],
            lambda values: [
                submit.at_once(self._one(Kind.REDUCESCATTER, values[0], name, process_set, build))
            ],
            self._gathered_gradients(name, op, process_set, prescale_factor, postscale_factor),
        )[0]

    def reducescatter_async(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle:
        """`reducescatter` that returns a handle."""
        build = self._scattered(op, prescale_factor, postscale_factor)
        return submit.alone(self._one(Kind.REDUCESCATTER, tensor, name, process_set, build))

    def grouped_reducescatter(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        compression: Compressor = no_compression,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[T]:
        """`reducescatter` of several tensors at once."""
        rest = (op, process_set, prescale_factor, postscale_factor)
        return self._through(
            compression,
            tensors,
            lambda values: self.grouped_reducescatter_async(values, name, *rest).wait(),
            self._gathered_gradients(name, *rest),
        )

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle:
        """`grouped_reducescatter` that returns one handle."""
        build = self._scattered(op, prescale_factor, postscale_factor)
        return submit.grouped(self._each(Kind.REDUCESCATTER, tensors, name, process_set, build))

    def _through(
        self, compression: Compressor, tensors: Sequence[T], forward: Map[T], backward: Map[T]
    ) -> list[T]:
        """`forward` on compressed tensors, with `backward` as its gradient."""
        pairs = [_compressed(compression, tensor) for tensor in tensors]
        values, contexts = [small for small, _ in pairs], [context for _, context in pairs]
        results = self._differentiable(forward, backward, values)
        return [compression.decompress(r, c) for r, c in zip(results, contexts, strict=True)]

    def _gathered_gradients(
        self, name: str | None, op: int, process_set: ProcessSet, prescale: float, postscale: float
    ) -> Map[T]:
        """The gradient of reducescatter: every rank's rows count for all."""

        def backward(gradients: list[T]) -> list[T]:
            divisor = process_set.size() if _linear(None, op) is Average else 1
            options = self._options(gradients[0], gradient_name(name), process_set)
            handles = submit.grouped(
                [
                    submit.allgather(
                        self._tensors.copied(gradient) * (prescale * postscale / divisor),
                        options.numbered(index),
                    )
                    for index, gradient in enumerate(gradients)
                ]
            )
            return [
                self._tensors.made(out.astype(self._tensors.shared(gradient).dtype, copy=False), gradient)
                for out, gradient in zip(handles.wait(), gradients, strict=True)
            ]

        return backward

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

    def _scattered(self, op: int, prescale: float, postscale: float) -> Build[T]:
        def build(tensor: T, options: submit.Options) -> Operation:
            data = self._tensors.shared(tensor)
            operation = submit.reducescatter(data, ReduceOp.check(op), prescale, postscale, options)
            operation.handle.then(lambda out: self._tensors.made(out, tensor))
            return operation

        return build


def _compressed(compression: Compressor, tensor: Any) -> tuple[Any, Any]:
    """What the compressor makes of the tensor; an exception in its place is told to every rank."""
    if isinstance(tensor, Exception):
        return tensor, None
    try:
        small, context = compression.compress(tensor)
    except Exception as error:  # noqa: BLE001 - users write their own
        return error, None
    return small, context


def _linear(average: bool | None, op: int | None) -> ReduceOp:
    """The op, if it has a gradient.

    Raises:
        InvalidArgumentError: it has none.
    """
    resolved = ReduceOp.resolve(average, op)
    if resolved not in (Average, Sum):
        raise InvalidArgumentError(
            f"op {resolved.name} has no gradient; detach the tensor, or use Average or Sum"
        )
    return resolved
