"""The collectives on NumPy arrays: `hvdp.allreduce` and its kin."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hvdp._core.arrays import Array, dtype_named
from hvdp._core.casts import recast
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
        if not tensor.flags.c_contiguous:
            return np.array(tensor, order="C")
        # A numpy.matrix stays two-dimensional whatever is done to it.
        return tensor if type(tensor) is np.ndarray else tensor.view(np.ndarray)

    def made(self, array: Array, like: ArrayLike) -> Array:
        return array

    def written(self, tensor: ArrayLike, array: Array) -> Array:
        assert isinstance(tensor, np.ndarray)
        if array is not tensor and not np.may_share_memory(array, tensor):
            tensor[...] = array
        return tensor

    def device(self, tensor: ArrayLike) -> str:
        return "cpu"

    def with_gradient(self, forward: Map[Any], backward: Map[Any], tensors: list[Any]) -> list[Any]:
        return forward(tensors)


class _Compressor(CastCompressor):
    """Also for what NumPy makes arrays of."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        super().__init__(dtype, lambda array: array.dtype.kind == "f", recast)

    def compress(self, tensor: ArrayLike) -> tuple[Any, Any]:
        return super().compress(np.asarray(tensor))


class Compression:
    """What `compression=` takes: float32 and float64 may travel as 16-bit floats."""

    none = no_compression
    fp16 = _Compressor(np.dtype(np.float16))
    bf16 = _Compressor(dtype_named("bfloat16"))


collectives: Collectives[Array] = Collectives(_NumPy())
