"""TensorFlow tensors as the collectives see them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdp._core.arrays import Array
from hvdp._core.compression import CastCompressor
from hvdp.collectives import Collectives, Map, no_compression
from hvdp.errors import InvalidArgumentError
from hvdp.tensorflow._graph import OPERATION, as_array, device_of, in_order, is_symbolic

__all__ = ["Compression", "as_tensor", "collectives"]


def as_tensor(value: Any) -> Any:
    """What a collective is called with as a tensor; eagerly, why it is none, which every rank is told."""
    try:
        if isinstance(value, Exception):
            raise value
        return tf.convert_to_tensor(value)
    except Exception as error:
        if not tf.executing_eagerly():
            raise
        return error


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
