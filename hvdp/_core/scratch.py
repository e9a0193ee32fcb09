"""Memory for intermediate results, kept: fresh memory would be paged in at every call."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from hvdp._core.arrays import Array

__all__ = ["PIECE_BYTES", "scratch"]

PIECE_BYTES = 1 << 17
"""Bytes of one operand in one kernel call: a few of them fit a core's L2 cache."""

_MOST_BYTES = 2 * PIECE_BYTES  # a piece of 16-bit floats as float32


class _Scratch(threading.local):
    """A few pieces a thread."""

    def __init__(self) -> None:
        self._memories: list[Array] = []

    def take(self, number: int, dtype: np.dtype[Any], count: int) -> Array:
        """Piece `number`, valid until it is taken again; a new array where it does not fit."""
        nbytes = count * dtype.itemsize
        if nbytes > _MOST_BYTES:
            return np.empty(count, dtype)
        while len(self._memories) <= number:
            self._memories.append(np.empty(0, np.uint8))
        if self._memories[number].size < nbytes:
            self._memories[number] = np.empty(_MOST_BYTES, np.uint8)
        return self._memories[number][:nbytes].view(dtype)


scratch = _Scratch()
