"""Smaller tensors on the way: cast before the reduction, and back after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["CastCompressor", "Compressor", "NoCompressor"]


class Compressor(Protocol):
    """What `compression=` takes; users may write their own."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what `decompress` needs to know."""

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """The received tensor in the form of the original."""


class NoCompressor:
    """Tensors travel as they are."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        return tensor


class CastCompressor:
    """Floating-point tensors travel as another dtype; others as they are.

    Args:
        dtype: the framework's dtype to travel as.
        floating: whether a tensor's dtype is a floating-point one.
        cast: a tensor as another dtype.
    """

    def __init__(self, dtype: Any, floating: Callable[[Any], bool], cast: Callable[[Any, Any], Any]) -> None:
        self._dtype = dtype
        self._floating = floating
        self._cast = cast

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        if not self._floating(tensor):
            return tensor, None
        return self._cast(tensor, self._dtype), tensor.dtype

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else self._cast(tensor, ctx)
