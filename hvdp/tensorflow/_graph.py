"""Host code inside TensorFlow programs: arrays of tensors, and calls that keep their order.

In a graph, TensorFlow runs what does not depend on each other in any order and at once. Two
calls that wait for other ranks would then take up threads in a different order on each rank,
and no rank might get on. So every call that waits holds a token, a variable: TensorFlow keeps
the order of what uses one variable, also across nested functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from hvdp._core.arrays import Array

__all__ = ["OPERATION", "after_earlier", "as_array", "as_written", "device_of", "in_order", "is_symbolic"]

# The name of host code in a graph: XLA's error, "unsupported operations", says it.
OPERATION = "hvdp_needs_jit_compile_False"

Function = TypeVar("Function", bound=Callable[..., Any])

_tokens: list[Any] = []


def as_written(function: Function) -> Function:
    """Keep AutoGraph from rewriting a function that a `tf.function` calls; it has no use for it."""
    unconverted: Function = tf.autograph.experimental.do_not_convert(function)
    return unconverted


def is_symbolic(tensors: Sequence[Any]) -> bool:
    """Whether these tensors, or others made now, have no values yet."""
    return not tf.executing_eagerly() or any(
        tf.is_tensor(tensor) and not hasattr(tensor, "numpy") for tensor in tensors
    )


def as_array(tensor: Any, copy: bool = False) -> Array:
    """An eager tensor's values; on its own memory where possible and `copy` is false."""
    if not copy and tensor.dtype not in (tf.bfloat16, tf.string) and "CPU" in tensor.device:
        return np.asarray(memoryview(tensor))
    array: Array = np.array(tensor.numpy(), order="C", copy=copy or None)
    return array


def device_of(tensor: Any) -> str:
    """The kind of device, by the names that other adapters use as well."""
    kind = str(tf.DeviceSpec.from_string(getattr(tensor, "device", "") or "").device_type or "CPU")
    return {"CPU": "cpu", "GPU": "cuda"}.get(kind, kind.lower())


def after_earlier() -> Any:
    """A context for operations that do not wait themselves, but have to follow all earlier `in_order`."""
    return tf.control_dependencies([_token().read_value()])


def in_order(call: Callable[[], Any]) -> Any:
    """The results of `call`, which makes operations in a graph, after all earlier such calls have run."""
    with after_earlier():
        results = call()
    with tf.control_dependencies(tf.nest.flatten(results)):
        _token().assign(1, read_value=False)
    return results


def _token() -> Any:
    if not _tokens:
        with tf.init_scope(), tf.device("CPU:0"):
            _tokens.append(tf.Variable(0, trainable=False, name="hvdp_order"))
    return _tokens[0]
