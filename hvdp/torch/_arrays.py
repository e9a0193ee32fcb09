"""Torch tensors as NumPy arrays and back, without a copy where memory allows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from hvdp._core.arrays import Array
from hvdp.errors import InvalidArgumentError

__all__ = ["as_array", "as_tensor", "device_of", "dtype_name", "workspace", "write_back"]


def dtype_name(dtype: torch.dtype) -> str:
    """As NumPy and ml_dtypes spell it: "float32", "bfloat16", ..."""
    return str(dtype).removeprefix("torch.")


def device_of(tensor: object) -> str:
    """The kind of device, as "cpu" or "cuda"; "cpu" where it is no tensor, which is an error later."""
    return tensor.device.type if isinstance(tensor, torch.Tensor) else "cpu"


def as_array(tensor: torch.Tensor) -> Array:
    """A view of a contiguous CPU tensor; the memory stays shared."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: Array = tensor.numpy()
    return array


def as_tensor(array: Array) -> torch.Tensor:
    """A CPU tensor on a writable array's memory."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def workspace(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """A contiguous CPU tensor with the same values: itself where possible and `copy` is false.

    Raises:
        InvalidArgumentError: not a dense tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"expected a torch.Tensor. Received: {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise InvalidArgumentError(f"expected a dense tensor. Received: layout {tensor.layout}")
    work = tensor.detach()
    if not work.is_cpu or not work.is_contiguous() or work.is_conj() or work.is_neg():
        work = work.to("cpu").contiguous().resolve_conj().resolve_neg()
    return work.clone() if copy and work.data_ptr() == tensor.data_ptr() else work


def write_back(tensor: torch.Tensor, array: Array) -> torch.Tensor:
    """Copy values back into the tensor whose workspace the array is, unless it is its memory; returns it."""
    if tensor.is_cpu and tensor.data_ptr() == array.__array_interface__["data"][0]:
        # Written behind autograd's back: a graph that saved the old values must notice.
        torch.autograd.graph.increment_version(tensor)
    else:
        with torch.no_grad():
            tensor.copy_(as_tensor(array))
    return tensor
