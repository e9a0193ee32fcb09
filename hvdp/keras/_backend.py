"""The module for the backend that Keras has; its framework is loaded already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

import keras

from hvdp._core.arrays import Array
from hvdp.errors import InvalidArgumentError
from hvdp.gradients import ArrayReducer

__all__ = ["Backend", "backend"]

Function = TypeVar("Function", bound=Callable[..., Any])
Watch = Callable[[ArrayReducer, Sequence[Any], Callable[[int, Any], Any]], Callable[[], None]]
"""Gives the reducer what a function makes of a variable's number and gradient, which may be None, when
backward is done with it; returns what ends that."""


class Backend(Protocol):
    """What Keras's public operations do not offer on each backend."""

    def is_sparse(self, gradient: Any) -> bool:
        """Whether a gradient is zero but for some rows."""

    def densified(self, gradient: Any) -> Any:
        """A dense tensor of a gradient."""

    watch: Watch | None
    """For `Overlap`, where there is a backward to watch."""

    def reduce(self, reducer: ArrayReducer, gradients: Sequence[Any]) -> tuple[list[Any] | None, Any]:
        """The reduced gradients, for the step under way, and whether they are: after a window's last pass.

        In a program that is being traced the flag is a tensor.
        """

    def call(self, function: Callable[[list[Array]], list[Array]], tensors: Sequence[Any]) -> list[Any]:
        """`function` on the tensors' values, now or when the program runs; alike in shapes and dtypes."""

    def untraced(self, function: Function) -> Function:
        """`function`, which a compiler calls as it is where it could not follow it."""

    def when(self, flag: Any, step: Callable[[], None], variables: Sequence[Any]) -> None:
        """Make the step, which changes these variables, if the flag is true."""


def backend() -> Backend:
    """The one for `keras.backend.backend()`.

    Raises:
        InvalidArgumentError: Keras runs on one that hvdp does not know.
    """
    name = keras.backend.backend()
    if name not in ("tensorflow", "torch", "jax"):
        raise InvalidArgumentError(
            f"hvdp.keras works on the backends tensorflow, torch and jax. Received: {name}"
        )
    return cast(Backend, import_module(f"hvdp.keras._{name}"))
