"""The collectives on torch tensors of any device and layout."""

from __future__ import annotations

import torch

from hvdp._core.arrays import Array
from hvdp._core.compression import CastCompressor
from hvdp.collectives import Collectives, no_compression
from hvdp.torch._arrays import as_array, as_tensor, workspace, write_back

__all__ = ["Compression", "collectives"]


class _Torch:
    def copied(self, tensor: torch.Tensor) -> Array:
        return as_array(workspace(tensor, copy=True))

    def shared(self, tensor: torch.Tensor) -> Array:
        return as_array(workspace(tensor, copy=False))

    def writable(self, tensor: torch.Tensor) -> Array:
        return as_array(workspace(tensor, copy=False))

    def made(self, array: Array, like: torch.Tensor) -> torch.Tensor:
        return as_tensor(array).to(like.device)

    def written(self, tensor: torch.Tensor, array: Array) -> torch.Tensor:
        return write_back(tensor, as_tensor(array))

    def device(self, tensor: torch.Tensor) -> str:
        return tensor.device.type


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype)


class Compression:
    """What `compression=` takes: float32 and float64 may travel as 16-bit floats."""

    none = no_compression
    fp16 = CastCompressor(torch.float16, torch.is_floating_point, _cast)
    bf16 = CastCompressor(torch.bfloat16, torch.is_floating_point, _cast)


collectives: Collectives[torch.Tensor] = Collectives(_Torch())
