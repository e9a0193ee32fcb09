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

__all__ = ["Cast", "Widened", "is_narrow", "lend_casts", "narrow", "recast"]

Cast = Callable[[Array, Array], None]
"""Fills its second argument with the values of the first; both 1-D, contiguous, of a piece at most."""

_FLOAT16, _FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
_UINT16, _INT16 = np.dtype(np.uint16), np.dtype(np.int16)
_UINT32, _INT32 = np.dtype(np.uint32), np.dtype(np.int32)

# Arrays: NumPy takes as long to make one of a number as to work through 4 KiB.
_TO_FLOAT32 = np.array(13, _INT32)
_SIGN_AND_VALUE = np.array(0x8FFFE000, _UINT32).view(_INT32)
_EXPONENT_BIAS = np.array(2.0**112, _FLOAT32)
_UPPER_HALF = np.array(16, _UINT32)
_SIGN, _EXPONENT = np.array(0x8000, _UINT16), np.array(0x7F80, _UINT16)
_BOTH_EXPONENTS = np.array((1 << 16) + (1 << 3), _UINT32)
_BOTH_BIASES = np.array((13 << 23) + (15 << 10), _UINT32)
_SIZE, _ONE = np.array(0x7FFF, _UINT16), np.array(1, _UINT16)
_LARGEST_SUBNORMAL, _INFINITY, _MINUS_INFINITY = 0x3FF, 0x7C00, 0xFC00
_SUBNORMAL = np.array(2.0**-130, _FLOAT32)
_LARGE = 0x4700  # 2^15 and more


def _cast(source: Array, target: Array) -> None:
    np.copyto(target, source, casting="unsafe")


@cache
def _every_float16() -> Array:
    return np.arange(1 << 16, dtype=_UINT16).view(_FLOAT16).astype(_FLOAT32)


def _widen_float16(source: Array, target: Array) -> None:
    """The bits in their places are the value times 2^-112.

    65,536 items take 55 us; looking the values up takes 85 us, NumPy's cast 150 us. Many subnormal
    values are looked up: they would be subnormal in float32 too, which some processors multiply fifty
    times more slowly; all are where somebody has the processor take them for zero.
    """
    signed, unsigned = source.view(_INT16), source.view(_UINT16)
    if _has_many_subnormals(unsigned) or not _SUBNORMAL * _EXPONENT_BIAS:
        np.take(_every_float16(), unsigned, out=target, mode="wrap")
        return
    bits = target.view(_INT32)
    bits[...] = signed
    np.left_shift(bits, _TO_FLOAT32, out=bits)
    np.bitwise_and(bits, _SIGN_AND_VALUE, out=bits)
    np.multiply(target, _EXPONENT_BIAS, out=target)
    # NumPy's max is a Python function. The largest number without a sign is the least negative value.
    if signed[signed.argmax()] >= _INFINITY or unsigned[unsigned.argmax()] >= _MINUS_INFINITY:
        special = ~np.isfinite(source)
        target[special] = source[special]


def _has_many_subnormals(bits: Array) -> bool:
    """Whether looking all values up is faster: from one in 64 on, judged by one value in 16."""
    sizes = np.bitwise_and(bits[::16], _SIZE)
    np.subtract(sizes, _ONE, out=sizes)  # zero becomes the largest number
    return int(np.count_nonzero(sizes < _LARGEST_SUBNORMAL)) * 64 > sizes.size


@cache
def _least_exponents() -> Array:
    """Float16's in the place of float32's; NumPy's maximum of an array and a number takes 30 us."""
    return np.full(PIECE_BYTES // 2, 0x3880, _UINT16)


def _narrow_float16(source: Array, target: Array) -> None:
    """An addition does the rounding: to a power of two so large that 11 bits of the value stay.

    The idea is that of Marat Dukhan's FP16 library. The power of two has the result's exponent in
    its own last bits, so that the sum ends in the result. 65,536 items take 105 us whatever their
    values; NumPy's cast takes 280 us, and 7 ms where they are subnormal in float16, as small
    gradients are.
    """
    wide = scratch.take(1, _UINT32, source.size)
    halves = scratch.take(2, _UINT16, 2 * source.size)
    exponents, signs = halves[: source.size], halves[source.size :]
    np.right_shift(source.view(_UINT32), _UPPER_HALF, out=wide)
    exponents[...] = wide
    np.bitwise_and(exponents, _SIGN, out=signs)
    np.bitwise_and(exponents, _EXPONENT, out=exponents)
    if exponents[exponents.argmax()] >= _LARGE:
        _narrow_large_float16(source, target)
        return
    np.maximum(exponents, _least_exponents()[: source.size], out=exponents)
    np.bitwise_or(exponents, signs, out=exponents)
    # 2^13 times the value's own power of two, which is at least 2^-14. The exponent in the last bits
    # is one less, because the first of the value's 11 bits adds to it.
    wide[...] = exponents
    np.multiply(wide, _BOTH_EXPONENTS, out=wide)
    np.add(wide, _BOTH_BIASES, out=wide)
    total = wide.view(_FLOAT32)
    np.add(source, total, out=total)
    bits = target.view(_UINT16)
    bits[...] = wide
    np.bitwise_or(bits, signs, out=bits)


def _narrow_large_float16(source: Array, target: Array) -> None:
    """With values among them that may become infinite, or are no number: those by NumPy's cast."""
    with np.errstate(all="ignore"):
        large = ~(np.abs(source) < 2.0**15)
        _narrow_float16(np.where(large, _FLOAT32.type(0), source), target)
        target[large] = source[large]
    target[np.isnan(source)] = np.nan


def _one_nan(cast: Cast) -> Cast:
    """What is no number becomes one and the same, as above, whoever casts."""

    def narrow(source: Array, target: Array) -> None:
        cast(source, target)
        if np.isnan(source[source.argmax()]):
            target[np.isnan(source)] = np.nan

    return narrow


_casts: dict[np.dtype[Any], tuple[Cast, Cast]] = {
    _FLOAT16: (_widen_float16, _narrow_float16),
    np.dtype(ml_dtypes.bfloat16): (_cast, _one_nan(_cast)),
}


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Whether it is a 16-bit float."""
    return dtype in _casts


def lend_casts(dtype: np.dtype[Any], widen: Cast, narrow: Cast) -> None:
    """Replace the casts of a 16-bit float to and from float32 by faster ones of the same values."""
    _casts[dtype] = widen, _one_nan(narrow)


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


def recast(array: Array, dtype: np.dtype[Any]) -> Array:
    """A copy as another dtype; between float16 and float32 by the casts above, which are faster."""
    if (array.dtype, dtype) == (_FLOAT16, _FLOAT32):
        cast, _ = _casts[_FLOAT16]
    elif (array.dtype, dtype) == (_FLOAT32, _FLOAT16):
        _, cast = _casts[_FLOAT16]
    else:
        with np.errstate(all="ignore"):  # an overflow is data, as above
            return array.astype(dtype)
    result = np.empty(array.shape, dtype)
    source, target = np.ascontiguousarray(array).reshape(-1), result.reshape(-1)
    step = PIECE_BYTES // 2
    for start in range(0, source.size, step):
        piece = slice(start, start + step)
        cast(source[piece], target[piece])
    return result
