"""Keras's JAX backend: host callbacks, also inside `jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from hvdp._core.arrays import Array
from hvdp.gradients import ArrayReducer

__all__ = ["call", "densified", "is_sparse", "reduce", "untraced", "watch", "when"]

watch = None  # backward is a part of the program


def is_sparse(gradient: Any) -> bool:
    """Whether it is zero but for some rows; JAX's sparse gradients are reduced as dense ones."""
    return False


def densified(gradient: Any) -> Any:
    """A dense array of it."""
    return gradient.todense() if hasattr(gradient, "todense") else gradient


def reduce(reducer: ArrayReducer, gradients: Sequence[Any]) -> tuple[list[Any] | None, Any]:
    """The reduced gradients, and whether they are: after a window's last pass.

    While tracing, the flag is an array, and without it the gradients mean nothing.
    """
    own = [i for i, gradient in enumerate(gradients) if gradient is not None]
    reducer.prepare(own, ())
    tensors = [densified(gradients[index]) for index in own]
    wanted = sorted(reducer.present or ())
    traced = any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)

    def run(*arrays: Any) -> tuple[Any, ...]:
        pairs = zip(own, arrays, strict=True)
        reducer.give({index: np.asarray(array) for index, array in reversed(list(pairs))})
        results = reducer.finish()
        found = [(results or {}).get(index) for index in wanted]
        filled = [reducer.empty(i) if r is None else r for i, r in zip(wanted, found, strict=True)]
        return np.bool_(results is not None), *filled

    if traced:
        shapes = [
            jax.ShapeDtypeStruct(reducer.specs[i].shape, np.dtype(reducer.specs[i].dtype)) for i in wanted
        ]
        done, *values = io_callback(
            run, (jax.ShapeDtypeStruct((), np.bool_), *shapes), *tensors, ordered=True
        )
    else:
        flag, *arrays = run(*tensors)
        done = bool(flag)
        # Copies: arrays in JAX must not change, and these lie in the buckets.
        values = [jax.numpy.array(array, copy=True) for array in arrays]
    result: list[Any] = [None] * len(gradients)
    for index, value in zip(wanted, values, strict=True):
        result[index] = value
    return result, done


def call(function: Callable[[list[Array]], list[Array]], tensors: Sequence[Any]) -> list[Any]:
    """`function` on the arrays' values, now or whenever the program runs; alike in shapes and dtypes."""
    if not any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
        return [jax.numpy.array(a, copy=True) for a in function([np.array(tensor) for tensor in tensors])]
    shapes = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]
    return list(io_callback(lambda *a: function([np.array(x) for x in a]), shapes, *tensors, ordered=True))


def untraced(function: Any) -> Any:
    """The function itself: tracing runs it, and host callbacks are all that it leaves in the program."""
    return function


def when(flag: Any, step: Callable[[], None], variables: Sequence[Any]) -> None:
    """Make the step if the flag is true; traced, make it and take it back."""
    if isinstance(flag, bool):
        if flag:
            step()
        return
    old = [variable.value for variable in variables]
    step()
    for variable, value in zip(variables, old, strict=True):
        variable.assign(jax.numpy.where(flag, variable.value, value))
