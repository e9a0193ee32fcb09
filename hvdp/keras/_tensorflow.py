"""Keras's TensorFlow backend: gradients through hvdp.tensorflow, which knows graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdp._core.arrays import Array
from hvdp.gradients import ArrayReducer
from hvdp.tensorflow._graph import OPERATION, as_array, as_written, in_order, is_symbolic
from hvdp.tensorflow.gradients import reduce_gradients

__all__ = ["call", "densified", "is_sparse", "reduce", "untraced", "watch", "when"]

watch = None  # backward is a part of the program


def is_sparse(gradient: Any) -> bool:
    """Whether it is zero but for some rows."""
    return isinstance(gradient, tf.IndexedSlices)


def densified(gradient: Any) -> Any:
    """A dense tensor of it."""
    return tf.convert_to_tensor(gradient)


def reduce(reducer: ArrayReducer, gradients: Sequence[Any]) -> tuple[list[Any] | None, Any]:
    """As `hvdp.tensorflow.gradients.reduce_gradients`: for the step under way only."""
    return reduce_gradients(reducer, gradients, copy=False)


def call(function: Callable[[list[Array]], list[Array]], tensors: Sequence[Any]) -> list[Any]:
    """`function` on the tensors' values, now or whenever the graph runs; alike in shapes and dtypes."""
    if not is_symbolic(tensors):
        return [tf.constant(array) for array in function([as_array(tensor, copy=True) for tensor in tensors])]

    def run(*arrays: Array) -> list[Array]:
        return function([array.copy() for array in arrays])

    dtypes = [tensor.dtype for tensor in tensors]
    results = in_order(lambda: tf.numpy_function(run, tensors, dtypes, name=OPERATION))
    return [tf.ensure_shape(r, tensor.shape) for r, tensor in zip(results, tensors, strict=True)]


def untraced(function: Any) -> Any:
    """The function itself: tracing runs it, and host callbacks are all that it leaves in the program."""
    return function


def when(flag: Any, step: Callable[[], None], variables: Sequence[Any]) -> None:
    """Make the step if the flag is true, which may be known only when the graph runs."""
    if isinstance(flag, bool):
        if flag:
            step()
        return

    def stepped() -> Any:
        step()
        return tf.constant(True)

    tf.cond(flag, as_written(stepped), lambda: tf.constant(False))
