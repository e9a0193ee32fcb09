"""Batch normalisation with the statistics of all ranks' batches."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from hvdp._core.ops import Sum
from hvdp._core.runtime import runtime
from hvdp.errors import InvalidArgumentError
from hvdp.process_sets import ProcessSet, global_process_set
from hvdp.torch.collectives import collectives

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Normalises as BatchNorm would on the batches of all ranks joined into one.

    In training each forward and each backward is one small collective. Batches may differ in
    size, and be empty on some ranks. In evaluation, and with one rank, it is BatchNorm.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as of `torch.nn.BatchNorm2d`;
            the input is (N, num_features) or (N, num_features, ...).
        process_set: the ranks whose batches belong together; only they run it.

    Raises:
        ValueError: in training, where all ranks together have one value per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replace every BatchNorm in a model, in place; a module that is one is returned anew.

        Parameters and buffers are taken over as they are, so an optimizer may exist already.

        Raises:
            InvalidArgumentError: a lazy layer does not know its size yet.
        """
        return cls._converted(module, process_set, {})

    @classmethod
    def _converted(
        cls, module: torch.nn.Module, process_set: ProcessSet, done: dict[torch.nn.Module, torch.nn.Module]
    ) -> torch.nn.Module:
        if module not in done:
            done[module] = module
            if isinstance(module, _BatchNorm) and not isinstance(module, cls):
                done[module] = cls._of(module, process_set)
            # named_children() would leave out the other places of a shared module.
            for name, child in list(module._modules.items()):
                if child is not None:
                    setattr(module, name, cls._converted(child, process_set, done))
        return done[module]

    @classmethod
    def _of(cls, layer: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        if isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin):
            raise InvalidArgumentError(
                "convert_sync_batchnorm() needs to know each layer's size: run the model once before. "
                f"Received: {layer}"
            )
        # On the meta device, so that nothing is allocated and no random number drawn.
        with torch.device("meta"):
            new = cls(
                layer.num_features,
                layer.eps,
                layer.momentum,
                layer.affine,
                layer.track_running_stats,
                process_set,
            )
        new._parameters.update(layer._parameters)
        new._buffers.update(layer._buffers)
        return new.train(layer.training)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise InvalidArgumentError(
                f"SyncBatchNorm({self.num_features}) takes (N, {self.num_features}, ...). "
                f"Received: {tuple(input.shape)}"
            )

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        runtime.require("SyncBatchNorm")
        if self.process_set.size() == 1:
            return super().forward(input)
        means, variances, counts, needs = _gathered(input, self.process_set)
        total, mean, variance = _joined(means, variances, counts)
        if total == 1:
            raise ValueError(
                "SyncBatchNorm needs more than one value per channel in training. "
                f"Received: one on all ranks together, here {tuple(input.shape)}"
            )
        if total:
            self._track(mean, variance * (total / (total - 1)))
        needed = bool(needs.any())
        output: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input,
            self.weight,
            self.bias,
            mean,
            variance,
            self.eps,
            total,
            needed,
            self.process_set,
        )
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean), share or 0.0)
        self.running_var.lerp_(variance.to(self.running_var), share or 0.0)


@torch.no_grad()
def _gathered(input: torch.Tensor, process_set: ProcessSet) -> tuple[torch.Tensor, ...]:
    """Each rank's mean and variance (ranks, channels), number of values a channel, and whether its
    input needs a gradient (ranks, 1)."""
    channels = input.shape[1]
    count = input.numel() // max(channels, 1)
    row = torch.zeros(1, 2 * channels + 2, dtype=torch.float64, device=input.device)
    row[0, -1] = input.requires_grad
    if count:
        variance, mean = torch.var_mean(_wide(input), _others(input), correction=0)
        row[0, :channels], row[0, channels:-2], row[0, -2] = mean, variance, count
    name = f"sync_batch_norm.{channels}"
    rows = collectives.allgather(row, name=name, process_set=process_set)
    return rows[:, :channels], rows[:, channels:-2], rows[:, -2:-1], rows[:, -1:]


def _joined(
    means: torch.Tensor, variances: torch.Tensor, counts: torch.Tensor
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The number, mean and variance of all values: parts' variances, and that of their means."""
    total = counts.sum()
    shares = counts / total.clamp(min=1)
    mean = (means * shares).sum(0)
    variance = ((variances + (means - mean).square()) * shares).sum(0)
    return int(total), mean, variance


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, where mean and variance depend on all ranks' x."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        eps: float,
        total: int,
        needed: bool,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        wide = _wide(input)
        ctx.save_for_backward(input, weight, mean, (variance + eps).rsqrt())
        ctx.total, ctx.needed, ctx.process_set = total, needed, process_set
        if not input.numel():
            return torch.empty_like(input)
        return F.batch_norm(
            wide,
            mean.to(wide.dtype),
            variance.to(wide.dtype),
            None if weight is None else weight.to(wide.dtype),
            None if bias is None else bias.to(wide.dtype),
            eps=eps,
        ).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, mean, scale = ctx.saved_tensors
        wide, upstream, dims = _wide(input), _wide(gradient), _others(input)
        mean, scale = mean.to(wide.dtype), scale.to(wide.dtype)
        normal = (wide - _along(mean, wide)) * _along(scale, wide)
        to_bias, to_weight = upstream.sum(dims), (upstream * normal).sum(dims)
        to_input = None
        if ctx.needed:  # by any rank, whose gradient depends on what this one adds
            channels = wide.shape[1]
            sums = torch.cat([to_bias, to_weight]).double()
            sums = collectives.allreduce(
                sums,
                name=f"sync_batch_norm.{channels}.gradient",
                op=Sum,
                process_set=ctx.process_set,
            )
            per_value, per_normal = (sums / max(ctx.total, 1)).to(wide.dtype).split(channels)
            factor = scale if weight is None else scale * weight.to(wide.dtype)
            rest = upstream - _along(per_value, wide) - normal * _along(per_normal, wide)
            to_input = (rest * _along(factor, wide)).to(input.dtype)
        own = [
            total.to(weight.dtype) if needed else None
            for total, needed in zip((to_weight, to_bias), ctx.needs_input_grad[1:3], strict=True)
        ]
        return to_input, *own, None, None, None, None, None, None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In at least 32 bits: sums of 16-bit floats would not do."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def _others(tensor: torch.Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [dimension for dimension in range(tensor.dim()) if dimension != 1]


def _along(channels: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return channels.view(1, -1, *[1] * (tensor.dim() - 2))
