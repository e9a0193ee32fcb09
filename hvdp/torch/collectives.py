"""The collectives on torch tensors of any device and layout; the synchronous ones are differentiable."""

from __future__ import annotations

from typing import Any

import torch

from hvdp._core.arrays import Array
from hvdp._core.compression import CastCompressor
from hvdp.collectives import Collectives, Map, no_compression
from hvdp.errors import InvalidArgumentError
from hvdp.torch._arrays import as_array, as_tensor, device_of, workspace, write_back

__all__ = ["Compression", "collectives"]


class _Torch:
    def copied(self, tensor: torch.Tensor) -> Array:
        return as_array(workspace(tensor, copy=True))

    def shared(self, tensor: torch.Tensor) -> Array:
        return as_array(workspace(tensor, copy=False))

    def writable(self, tensor: torch.Tensor) -> Array:
        array = as_array(workspace(tensor, copy=False))
        repeated = (n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        if array.size and any(repeated):
            raise InvalidArgumentError(
                "an expanded tensor has fewer values than elements and cannot be written; clone() it first. "
                f"Received: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            )
        return array

    def made(self, array: Array, like: torch.Tensor) -> torch.Tensor:
        return as_tensor(array).to(like.device)

    def written(self, tensor: torch.Tensor, array: Array) -> torch.Tensor:
        return write_back(tensor, array)

    def device(self, tensor: torch.Tensor) -> str:
        return device_of(tensor)

    def with_gradient(
        self, forward: Map[torch.Tensor], backward: Map[torch.Tensor], tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors):
            return list(_Differentiable.apply(forward, backward, *tensors))  # type: ignore[no-untyped-call]
        return forward(tensors)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype)


class Compression:
    """What `compression=` takes: float32 and float64 may travel as 16-bit floats."""

    none = no_compression
    fp16 = CastCompressor(torch.float16, torch.is_floating_point, _cast)
    bf16 = CastCompressor(torch.bfloat16, torch.is_floating_point, _cast)


class _Differentiable(torch.autograd.Function):
    """A function of tensors with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, forward: Map[torch.Tensor], backward: Map[torch.Tensor], *tensors: Any) -> Any:
        ctx.gradient = backward
        return tuple(forward([tensor.detach() for tensor in tensors]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.gradient(list(gradients))


collectives: Collectives[torch.Tensor] = Collectives(_Torch())
