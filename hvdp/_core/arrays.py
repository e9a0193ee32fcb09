"""The arrays that travel: dtypes the wire knows, and flat views of any layout."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from hvdp.errors import InvalidArgumentError

__all__ = ["Array", "as_bytes", "check_dtype", "dtype_label", "dtype_named"]

Array = np.ndarray[Any, np.dtype[Any]]

_NAMES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NAMES} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16)
}

_LABELS = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_label(dtype: np.dtype[Any]) -> str:
    """The dtype's name; `dtype.name` takes longer than a small collective's agreement."""
    return _LABELS.get(dtype) or str(dtype.name)


def check_dtype(dtype: np.dtype[Any]) -> str:
    """Name of a dtype that collectives carry.

    Raises:
        InvalidArgumentError: the dtype is not one of them (object, strings, byte-swapped, ...).
    """
    name = _LABELS.get(dtype)
    if name is None:
        raise InvalidArgumentError(
            f"collectives cannot carry this dtype; use one of {', '.join(_DTYPES)}, or "
            f"broadcast_object/allgather_object for Python objects. Received: dtype {dtype}"
        )
    return name


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of a name that `check_dtype` returned."""
    return _DTYPES[name]


def as_bytes(array: Array) -> Array:
    """A uint8 view of a C-contiguous array, sharing its memory."""
    return array.reshape(-1).view(np.uint8)
