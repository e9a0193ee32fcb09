"""Lists of TensorFlow gradients through the common mechanism, eager or while a graph runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdp._core.arrays import dtype_named
from hvdp._core.buckets import ParameterSpec
from hvdp.gradients import ArrayReducer, Rows
from hvdp.tensorflow._graph import OPERATION, after_earlier, as_array, as_written, in_order, is_symbolic

__all__ = ["reduce_gradients", "spec_of"]


def spec_of(name: str, shape: Sequence[int], dtype: str) -> ParameterSpec:
    """What the ranks compare about one gradient."""
    return ParameterSpec(name, tuple(shape), dtype, dtype_named(dtype).itemsize)


@as_written
def reduce_gradients(
    reducer: ArrayReducer, gradients: Sequence[Any], copy: bool
) -> tuple[list[Any] | None, Any]:
    """The reduced gradients, and whether they are: after a window's last pass.

    In a graph every bucket starts as soon as its gradients exist, while the rest of
    backward still runs; one operation at the end waits for all.

    Args:
        gradients: one for each parameter: a tensor, IndexedSlices, or None.
        copy: results may be kept. Else they are views, right until the next call.

    Returns:
        None for the gradients where eager, and there are none yet; in a graph the flag is
        a tensor, and without it the gradients mean nothing.
    """
    rows = {i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)}
    present = {i for i, gradient in enumerate(gradients) if gradient is not None}
    buckets = reducer.prepare(present, rows)
    if is_symbolic(tf.nest.flatten([g for g in gradients if g is not None], expand_composites=True)):
        return _in_graph(reducer, gradients, buckets, copy)
    given = {
        i: Rows(as_array(g.indices), as_array(g.values)) if i in rows else as_array(g)
        for i in reversed(range(len(gradients)))
        if (g := gradients[i]) is not None
    }
    reducer.give(given)
    results = reducer.finish()
    if results is None:
        return None, False
    found: list[Any] = [None] * len(gradients)
    for index, result in results.items():
        if isinstance(result, Rows):
            shape = tf.constant(reducer.specs[index].shape, tf.int64)
            found[index] = tf.IndexedSlices(tf.constant(result.values), tf.constant(result.indices), shape)
        else:
            found[index] = tf.constant(result)  # which copies
    return found, True


def _in_graph(
    reducer: ArrayReducer, gradients: Sequence[Any], buckets: list[tuple[int, ...]], copy: bool
) -> tuple[list[Any], Any]:
    started = []
    for bucket in [*buckets, tuple(reducer.sparse)]:
        members = [index for index in bucket if gradients[index] is not None]
        if members:
            # A second reduction in one graph begins when the first is done.
            with after_earlier():
                started.append(_giving(reducer, members, gradients))
    wanted = sorted(reducer.present or ())

    def finish() -> list[Any]:
        results = reducer.finish()
        arrays: list[Any] = [np.bool_(results is not None)]
        for index in wanted:
            result = (results or {}).get(index)
            if result is None:
                result = reducer.empty(index)
            arrays += result if isinstance(result, Rows) else [result]
        return [np.array(array) for array in arrays] if copy else arrays

    dtypes = [tf.bool]
    for index in wanted:
        own = tf.as_dtype(reducer.specs[index].dtype)
        dtypes += [tf.int64, own] if index in reducer.sparse else [own]
    with tf.control_dependencies(started):
        arrays = in_order(lambda: tf.numpy_function(finish, [], dtypes, name=OPERATION))
    return _found(reducer, wanted, arrays, len(gradients)), tf.ensure_shape(arrays[0], [])


def _giving(reducer: ArrayReducer, members: list[int], gradients: Sequence[Any]) -> Any:
    """An operation that hands gradients over and does not wait."""
    parts: list[Any] = []
    for index in members:
        gradient = gradients[index]
        parts += [gradient.indices, gradient.values] if isinstance(gradient, tf.IndexedSlices) else [gradient]
    is_rows = [isinstance(gradients[index], tf.IndexedSlices) for index in members]

    def give(*arrays: Any) -> Any:
        left = iter(arrays)
        reducer.give(
            {
                index: Rows(next(left), next(left)) if rows else next(left)
                for index, rows in zip(members, is_rows, strict=True)
            }
        )
        return np.bool_(True)

    return tf.numpy_function(give, parts, tf.bool, name=OPERATION)


def _found(reducer: ArrayReducer, wanted: list[int], arrays: list[Any], count: int) -> list[Any]:
    left = iter(arrays[1:])
    found: list[Any] = [None] * count
    for index in wanted:
        shape = reducer.specs[index].shape
        if index in reducer.sparse:
            indices, values = tf.ensure_shape(next(left), [None]), next(left)
            values = tf.ensure_shape(values, [None, *shape[1:]])
            found[index] = tf.IndexedSlices(values, indices, tf.constant(shape, tf.int64))
        else:
            found[index] = tf.ensure_shape(next(left), shape)
    return found
