"""The collectives on TensorFlow tensors: eager and in graphs, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdp._core.compression import Compressor
from hvdp._core.ops import Average, ReduceOp, Sum
from hvdp.collectives import no_compression
from hvdp.errors import InvalidArgumentError
from hvdp.process_sets import ProcessSet, global_process_set
from hvdp.tensorflow._graph import OPERATION, as_written, in_order, is_symbolic
from hvdp.tensorflow._tensors import Compression, as_tensor, collectives

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
    tensor = as_tensor(tensor)
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
    dense = {i: as_tensor(t) for i, t in enumerate(tensors) if not isinstance(t, tf.IndexedSlices)}
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
    tensor = as_tensor(tensor)
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
    tensors = [as_tensor(tensor) for tensor in tensors]
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
    tensor = as_tensor(tensor)
    return _any_rows(collectives.allgather(tensor, name, process_set), tensor)


@as_written
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allgather` of several tensors at once."""
    tensors = [as_tensor(tensor) for tensor in tensors]
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
    tensor = as_tensor(tensor)
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
    tensor = as_tensor(tensor)
    given = splits is not None
    counts = as_tensor(splits) if given else tf.zeros([0], tf.int64)
    if isinstance(counts, Exception):
        tensor = InvalidArgumentError(f"splits: {counts}")
    if isinstance(tensor, Exception):
        return collectives.alltoall_async(tensor, None, name, process_set).wait()
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
    label = None if name is None else f"{name}.values"
    try:
        resolved = ReduceOp.resolve(average, op)
        if resolved not in (Average, Sum):
            raise InvalidArgumentError(
                f"IndexedSlices can be reduced by Average and Sum. Received: op {resolved.name}"
            )
    except InvalidArgumentError as error:
        allgather(error, label, process_set=process_set)  # which tells every rank
        raise
    values = allgather(slices.values, label, process_set=process_set)
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
