"""16-bit floats to float32 and back, exactly and rounded to nearest even."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import cycle
from typing import Any

import ml_dtypes
import numpy as np

from hvdp._core.arrays import Array
from hvdp._core.scratch import PIECE_BYTES, scratch

__all__ = ["Cast", "Widened", "is_narrow", "lend_casts", "narrow"]

Cast = Callable[[Array, Array], None]
"""Fills its second argument with the values of the first; both 1-D, contiguous, of a piece at most."""

_PIECE = PIECE_BYTES // 2  # items
_FLOAT32, _UINT32 = np.dtype(np.float32), np.dtype(np.uint32)


def _cast(source: Array, target: Array) -> None:
    np.copyto(target, source, casting="unsafe")


@cache
def _every_float16() -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _widen_float16(source: Array, target: Array) -> None:
    # Looking values up takes 30 us for a piece, NumPy's cast 77 us; "wrap" saves it a copy.
    np.take(_every_float16(), source.view(np.uint16), out=target, mode="wrap")


@cache
def _least_exponent() -> Array:
    """Of float16 in the place of float32's; NumPy's maximum of an array and a number takes 20 us."""
    return np.full(_PIECE, 0x38800000, _UINT32)


def _narrow_float16(source: Array, target: Array) -> None:
    """An addition does the rounding: to a power of two so large that 11 bits of the value stay.

    The idea is that of Marat Dukhan's FP16 library. A piece takes 50 us whatever its values;
    NumPy's cast takes 100 us, and up to 10 ms where they are subnormal in float16, as small
    gradients are.
    """
    bits = source.view(np.uint32)
    result = scratch.take(1, _UINT32, source.size)
    other = scratch.take(2, _UINT32, source.size)
    value = result.view(np.float32)
    with np.errstate(all="ignore"):
        np.abs(source, out=value)
        np.multiply(value, np.float32(2.0**112), out=value)  # from 2^16 on it becomes infinite
        np.multiply(value, np.float32(2.0**-112), out=value)
        # 2^13 times the value's own power of two, at least 2^-14; 0x800 corrects the exponent below.
        np.bitwise_and(result, 0x7F800000, out=other)
        np.maximum(other, _least_exponent()[: other.size], out=other)
        np.add(other, 0x06800800, out=other)
        np.add(value, other.view(np.float32), out=value)
    # The exponent's last bits, and on top of them 11 bits of the value, of which the first is 1.
    np.right_shift(result, 13, out=other)
    np.add(result, other, out=result)
    np.bitwise_and(result, 0x7FFF, out=result)
    np.right_shift(bits, 16, out=other)
    np.bitwise_and(other, 0x8000, out=other)
    np.bitwise_or(result, other, out=result)
    _cast(result, target.view(np.uint16))


_casts: dict[np.dtype[Any], tuple[Cast, Cast]] = {
    np.dtype(np.float16): (_widen_float16, _narrow_float16),
    np.dtype(ml_dtypes.bfloat16): (_cast, _cast),
}


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Whether it is a 16-bit float."""
    return dtype in _casts


def lend_casts(dtype: np.dtype[Any], widen: Cast, narrow: Cast) -> None:
    """Replace the casts of a 16-bit float to and from float32 by faster ones of the same values."""
    _casts[dtype] = widen, narrow


class Widened:
    """16-bit floats as float32, as often as wanted; each one is valid until the next but one.

    Args:
        sources: of at most a piece each.
    """

    def __init__(self, sources: Sequence[Array]) -> None:
        self._sources = sources
        self._widen, _ = _casts[sources[0].dtype]

    def __iter__(self) -> Iterator[Array]:
        for source, number in zip(self._sources, cycle((1, 2)), strict=False):
            wide = scratch.take(number, _FLOAT32, source.size)
            self._widen(source, wide)
            yield wide


def narrow(source: Array, target: Array) -> None:
    """Round float32 to a 16-bit float; what is no number becomes one and the same, whoever casts."""
    _, cast = _casts[target.dtype]
    cast(source, target)
    if np.isnan(source.max(initial=-np.inf)):
        target[np.isnan(source)] = np.nan
