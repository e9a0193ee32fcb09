"""The two kinds of tensors under one face, so that a row of a table is written once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
INTS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
DTYPES = ("bool", *INTS, *FLOATS, *COMPLEX)

# How many items lie between two of a view's, and in which order its dimensions lie in memory.
LAYOUTS = ("plain", "transposed", "sliced", "channels_last")


def dtype_of(name: str) -> Any:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def epsilon(name: str) -> float:
    return float(ml_dtypes.finfo(dtype_of(name)).eps)


class Kit:
    """NumPy arrays, for `hvdp`."""

    name = "numpy"
    module = "hvdp"

    @property
    def hvd(self) -> ModuleType:
        return importlib.import_module(self.module)

    def of(self, values: Any) -> Any:
        """A contiguous tensor with the values and dtype of an array."""
        return np.array(values)

    def values(self, tensor: Any) -> Any:
        """An array with a tensor's values and dtype."""
        assert isinstance(tensor, np.ndarray), type(tensor)
        return tensor

    def strides(self, tensor: Any) -> tuple[int, ...]:
        """In bytes."""
        return tensor.strides

    def permuted(self, tensor: Any, order: tuple[int, ...]) -> Any:
        return tensor.transpose(order)

    def laid_out(self, values: Any, layout: str) -> Any:
        """A tensor of these values that lies in memory as its layout says."""
        if layout == "plain":
            return self.of(values)
        if layout == "sliced":
            base = self.of(np.zeros([2 * length + 1 for length in values.shape], values.dtype))
            view = base[tuple(slice(1, None, 2) for _ in values.shape)]
        else:
            dimensions = tuple(range(values.ndim))
            order = dimensions[::-1] if layout == "transposed" else (0, 2, 3, 1)
            base = self.of(np.zeros([values.shape[d] for d in order], values.dtype))
            view = self.permuted(base, tuple(order.index(d) for d in dimensions))
        view[...] = self.of(values)
        return view

    def call(self, name: str) -> Callable[..., Any]:
        return getattr(self.hvd, name)


class TorchKit(Kit):
    """Tensors, for `hvdp.torch`."""

    name = "torch"
    module = "hvdp.torch"

    def of(self, values: Any) -> Any:
        import torch

        if values.dtype == BFLOAT16:
            return torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)
        return torch.from_numpy(np.array(values))

    def values(self, tensor: Any) -> Any:
        import torch

        assert isinstance(tensor, torch.Tensor), type(tensor)
        if tensor.dtype is torch.bfloat16:
            return tensor.float().numpy().astype(BFLOAT16)
        return tensor.numpy()

    def strides(self, tensor: Any) -> tuple[int, ...]:
        return tensor.stride()

    def permuted(self, tensor: Any, order: tuple[int, ...]) -> Any:
        return tensor.permute(order)


def kits() -> list[Kit]:
    return [Kit(), TorchKit()]
