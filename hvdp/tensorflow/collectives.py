"""The collectives on TensorFlow tensors: eager and in graphs, differentiable."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdp._core.arrays import Array
from hvdp._core.compression import CastCompressor, Compressor
from hvdp._core.ops import Average, ReduceOp, Sum
from hvdp.collectives import Collectives, Map, no_compression
from hvdp.errors import InvalidArgumentError
from hvdp.process_sets import ProcessSet, global_process_set
from hvdp.tensorflow._graph import OPERATION, as_array, as_written, device_of, in_order, is_symbolic

__all__ = [
    "Compression",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "collectives",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]


class _TensorFlow:
    """Eager tensors; a graph's tensors stand for the values that they have in the call under way."""

    def __init__(self) -> None:
        self._call = threading.local()

    def copied(self, tensor: Any) -> Array:
        return as_array(self._value(tensor), copy=True)

    def shared(self, tensor: Any) -> Array:
        return as_array(self._value(tensor))

    def writable(self, tensor: Any) -> Array:
        raise InvalidArgumentError(
            "TensorFlow's tensors cannot be written; use the form that returns a new one"
        )

    def made(self, array: Array, like: Any) -> Any:
        return tf.constant(array)

    def written(self, tensor: Any, array: Array) -> Any:
        raise AssertionError("nothing is writable")

    def device(self, tensor: Any) -> str:
        return device_of(self._value(tensor))

    def with_gradient(self, forward: Map[Any], backward: Map[Any], tensors: list[Any]) -> list[Any]:
        if any(isinstance(tensor, Exception) for tensor in tensors):
            return forward(tensors)
        symbolic = is_symbolic(tensors)

        def run(*values: Any) -> Any:
            if symbolic:
                results = self._in_graph(lambda *now: forward(list(now)), values, [v.dtype for v in values])
            else:
                results = forward(list(values))

            def gradient(*gradients: Any) -> Any:
                gradients = tuple(tf.convert_to_tensor(gradient) for gradient in gradients)
                if not symbolic and not is_symbolic(gradients):
                    return backward(list(gradients))

                def call(*now: Any) -> Any:
                    count = len(tensors)
                    self._call.values = {id(t): v for t, v in zip(tensors, now[:count], strict=True)}
                    try:
                        return backward(list(now[count:]))
                    finally:
                        self._call.values = {}

                found = self._in_graph(call, (*values, *gradients), [v.dtype for v in values])
                return [tf.ensure_shape(f, v.shape) for f, v in zip(found, values, strict=True)]

            return results, gradient

        return list(tf.custom_gradient(run)(*tensors))

    def _value(self, tensor: Any) -> Any:
        return getattr(self._call, "values", {}).get(id(tensor), tensor)

    @staticmethod
    def _in_graph(function: Any, values: Sequence[Any], dtypes: list[Any]) -> list[Any]:
        return list(in_order(lambda: tf.py_function(function, values, dtypes, name=OPERATION)))


def _floating(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating)


class Compression:
    """What `compression=` takes: float32 and float64 may travel as 16-bit floats."""

    none = no_compression
    fp16 = CastCompressor(tf.float16, _floating, tf.cast)
    bf16 = CastCompressor(tf.bfloat16, _floating, tf.cast)


collectives: Collectives[Any] = Collectives(_TensorFlow())


@as_written
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = no_compression,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce over the members into a new tensor; IndexedSlices are gathered, for Average and Sum.

    Args:
        average: the older way to say `op`: True is Average, False is Sum.
        device_dense, device_sparse, ignore_name_scope: accepted as Horovod accepts them; not needed.
        compression: how the values travel: Compression.none, .fp16 or .bf16.
        op: Average (default), Sum, Min, Max, Product or Adasum.
    """
    if isinstance(tensor, tf.IndexedSlices):
        return _gathered_slices(tensor, average, op, prescale_factor * postscale_factor, name, process_set)
    tensor = _tensor(tensor)
    result = collectives.allreduce(
        tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return tf.ensure_shape(result, tensor.shape)


@as_written
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = no_compression,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """`allreduce` of several tensors at once; IndexedSlices one by one."""
    results: list[Any] = [None] * len(tensors)
    dense = {i: _tensor(t) for i, t in enumerate(tensors) if not isinstance(t, tf.IndexedSlices)}
    if dense:
        reduced = collectives.grouped_allreduce(
            list(dense.values()),
            average,
            name,
            compression,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
        )
        for (index, tensor), result in zip(dense.items(), reduced, strict=True):
            results[index] = tf.ensure_shape(result, tensor.shape)
    for index, slices in enumerate(tensors):
        if index not in dense:
            factor = prescale_factor * postscale_factor
            label = f"{name}.{index}" if name else None
            results[index] = _gathered_slices(slices, average, op, factor, label, process_set)
    return results


@as_written
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Compressor = no_compression,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce over the members, and return this member's rows of the result."""
    tensor = _tensor(tensor)
    result = collectives.reducescatter(
        tensor, name, compression, op, process_set, prescale_factor, postscale_factor
    )
    return _any_rows(result, tensor)


@as_written
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Compressor = no_compression,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """`reducescatter` of several tensors at once."""
    tensors = [_tensor(tensor) for tensor in tensors]
    results = collectives.grouped_reducescatter(
        tensors, name, compression, op, process_set, prescale_factor, postscale_factor
    )
    return [_any_rows(result, tensor) for result, tensor in zip(results, tensors, strict=True)]


@as_written
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """All members' tensors joined along the first dimension, which may differ between ranks."""
    tensor = _tensor(tensor)
    return _any_rows(collectives.allgather(tensor, name, process_set), tensor)


@as_written
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allgather` of several tensors at once."""
    tensors = [_tensor(tensor) for tensor in tensors]
    results = collectives.grouped_allgather(tensors, name, process_set)
    return [_any_rows(result, tensor) for result, tensor in zip(results, tensors, strict=True)]


@as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The values of `root_rank`, a global rank, in a new tensor."""
    tensor = _tensor(tensor)
    return tf.ensure_shape(collectives.broadcast(tensor, root_rank, name, process_set), tensor.shape)


@as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every member, and receive rows from every member, in member order.

    Returns:
        The received rows; where `splits` is given, a pair of them and an int64 tensor of how
        many came from each member.
    """
    tensor = _tensor(tensor)
    given = splits is not None
    counts = _tensor(splits) if given else tf.zeros([0], tf.int64)
    if isinstance(tensor, Exception) or isinstance(counts, Exception):
        return collectives.alltoall_async(tensor, splits, name, process_set).wait()
    symbolic = is_symbolic([tensor, counts])

    def exchange(rows: Any, wanted: Any, label: str | None) -> list[Any]:
        def call(rows: Any, wanted: Any) -> list[Any]:
            result = collectives.alltoall_async(
                rows, wanted.numpy() if given else None, label, process_set
            ).wait()
            return list(result) if given else [result, tf.zeros([0], tf.int64)]

        if not symbolic:
            return call(rows, wanted)
        return list(
            in_order(lambda: tf.py_function(call, [rows, wanted], [rows.dtype, tf.int64], name=OPERATION))
        )

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(rows: Any) -> Any:
        back = None if name is None else f"{name}.gradient"
        result, received = exchange(rows, counts, name)
        return (result, received), lambda gradient, _: tf.ensure_shape(
            exchange(gradient, received, back)[0], rows.shape
        )

    rows, received = run(tensor)
    rows = _any_rows(rows, tensor)
    return (rows, tf.ensure_shape(received, [process_set.size()])) if given else rows


def _tensor(value: Any) -> Any:
    """What a collective is called with as a tensor; eagerly, why it is none, which every rank is told."""
    try:
        if isinstance(value, Exception):
            raise value
        return tf.convert_to_tensor(value)
    except Exception as error:
        if not tf.executing_eagerly():
            raise
        return error


def _any_rows(result: Any, tensor: Any) -> Any:
    """The static shape of a result whose number of rows is not that of `tensor`."""
    if tensor.shape.rank is None:
        return result
    return tf.ensure_shape(result, [None, *tensor.shape[1:]])


def _gathered_slices(
    slices: Any,
    average: bool | None,
    op: int | None,
    factor: float,
    name: str | None,
    process_set: ProcessSet,
) -> Any:
    values = slices.values
    try:
        resolved = ReduceOp.resolve(average, op)
        if resolved not in (Average, Sum):
            raise InvalidArgumentError(
                f"IndexedSlices can be reduced by Average and Sum. Received: op {resolved.name}"
            )
    except InvalidArgumentError as error:
        values = error
    values = allgather(values, None if name is None else f"{name}.values", process_set=process_set)
    # Of no rows: nothing travels, but the ranks compare the shape. And ranks that have joined do not count.
    shape = [0] if slices.dense_shape is None else tf.concat([[0], tf.cast(slices.dense_shape, tf.int32)], 0)
    entries = [slices.indices, tf.zeros(shape, tf.uint8), tf.ones([1], tf.int64)]
    indices, _, ranks = collectives.grouped_allgather(
        entries, None if name is None else f"{name}.entries", process_set
    )
    if resolved is Average or factor != 1.0:
        count = tf.cast(tf.reduce_sum(ranks), tf.float64) if resolved is Average else 1.0
        values = values * tf.cast(factor / count, values.dtype)
    return tf.IndexedSlices(values, _any_rows(indices, slices.indices), slices.dense_shape)
