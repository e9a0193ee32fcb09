"""The collectives on NumPy arrays: `hvdp.allreduce` and its kin."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hvdp._core.arrays import Array, dtype_named
from hvdp._core.compression import CastCompressor
from hvdp.collectives import Collectives, Map, no_compression
from hvdp.errors import InvalidArgumentError

__all__ = ["Compression", "collectives"]


class _NumPy:
    """Arrays, and what NumPy makes arrays of: numbers and nested lists."""

    def copied(self, tensor: ArrayLike) -> Array:
        return np.array(tensor, order="C")

    def shared(self, tensor: ArrayLike) -> Array:
        return np.asarray(tensor, order="C")

    def writable(self, tensor: ArrayLike) -> Array:
        if not isinstance(tensor, np.ndarray) or not tensor.flags.writeable:
            what = "a read-only array" if isinstance(tensor, np.ndarray) else type(tensor).__name__
            raise InvalidArgumentError(
                f"an operation in place needs a writable numpy.ndarray. Received: {what}"
            )
        return tensor if tensor.flags.c_contiguous else np.array(tensor, order="C")

    def made(self, array: Array, like: ArrayLike) -> Array:
        return array

    def written(self, tensor: ArrayLike, array: Array) -> Array:
        assert isinstance(tensor, np.ndarray)
        if array is not tensor:
            tensor[...] = array
        return tensor

    def device(self, tensor: ArrayLike) -> str:
        return "cpu"

    def with_gradient(self, forward: Map[Any], backward: Map[Any], tensors: list[Any]) -> list[Any]:
        return forward(tensors)


def _floating(array: ArrayLike) -> bool:
    return np.asarray(array).dtype.kind == "f"


def _cast(array: ArrayLike, dtype: np.dtype[Any]) -> Array:
    return np.asarray(array).astype(dtype)


class Compression:
    """What `compression=` takes: float32 and float64 may travel as 16-bit floats."""

    none = no_compression
    fp16 = CastCompressor(np.dtype(np.float16), _floating, _cast)
    bf16 = CastCompressor(dtype_named("bfloat16"), _floating, _cast)


collectives: Collectives[Array] = Collectives(_NumPy())
