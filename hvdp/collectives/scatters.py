"""reducescatter, single and grouped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdp._core import submit
from hvdp._core.compression import Compressor
from hvdp._core.handles import Handle
from hvdp._core.operation import Operation
from hvdp._core.operations.reducescatter import shares
from hvdp._core.ops import Average, Kind, ReduceOp
from hvdp.collectives.tensors import Build, Map, OnTensors, T, gradient_name, no_compression
from hvdp.process_sets import ProcessSet, global_process_set

__all__ = ["Scatters"]


class Scatters(OnTensors[T]):
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
            self._scattered_gradients([tensor], name, op, process_set, prescale_factor, postscale_factor),
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
            self._scattered_gradients(tensors, name, *rest),
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

    def _scattered_gradients(
        self,
        tensors: Sequence[T],
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
    ) -> Map[T]:
        """The gradient of reducescatter: every rank's rows count for all, and of one that has joined none."""

        def backward(gradients: list[T]) -> list[T]:
            own, size, linear = process_set.rank(), process_set.size(), ReduceOp.linear(None, op)
            wholes = []
            for tensor, gradient in zip(tensors, gradients, strict=True):
                mine, shape = self._tensors.shared(gradient), self._tensors.shared(tensor).shape
                start = sum(shares(shape[0], size)[:own])
                whole = np.zeros(shape, mine.dtype)
                whole[start : start + len(mine)] = mine
                wholes.append(whole)
            options = self._options(gradients[0], gradient_name(name), process_set)
            submit.grouped(
                [
                    submit.allreduce(whole, linear, prescale, postscale, options.numbered(index))
                    for index, whole in enumerate(wholes)
                ]
            ).wait()
            return [self._tensors.made(w, g) for w, g in zip(wholes, gradients, strict=True)]

        return backward

    def _scattered(self, op: int, prescale: float, postscale: float) -> Build[T]:
        def build(tensor: T, options: submit.Options) -> Operation:
            data = self._tensors.shared(tensor)
            operation = submit.reducescatter(data, ReduceOp.check(op), prescale, postscale, options)
            operation.handle.then(lambda out: self._tensors.made(out, tensor))
            return operation

        return build
