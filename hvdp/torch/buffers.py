"""The average of what ranks track apart, such as the running statistics of BatchNorm."""

from __future__ import annotations

import torch

from hvdp._core.agreement import check_same_parameters
from hvdp._core.buckets import ParameterSpec
from hvdp._core.ops import Average, Max
from hvdp.process_sets import ProcessSet, global_process_set
from hvdp.torch._arrays import dtype_name
from hvdp.torch.collectives import collectives

__all__ = ["average_buffers"]


def average_buffers(model: torch.nn.Module, process_set: ProcessSet = global_process_set) -> None:
    """Make a model's buffers equal on all ranks, in place; collective.

    Floating-point and complex buffers (`running_mean`, `running_var`) become the ranks'
    average; integers and bools (`num_batches_tracked`) their maximum.

    Raises:
        MismatchError: the ranks' buffers differ in name, shape or dtype; on every rank.
    """
    buffers = dict(model.named_buffers())
    specs = [
        ParameterSpec(name, tuple(buffer.shape), dtype_name(buffer.dtype), buffer.element_size())
        for name, buffer in buffers.items()
    ]
    check_same_parameters("average_buffers", specs, process_set=process_set.number())
    inexact = [b for b in buffers.values() if b.is_floating_point() or b.is_complex()]
    exact = [b for b in buffers.values() if not (b.is_floating_point() or b.is_complex())]
    handles = [
        collectives.grouped_allreduce_async_(
            tensors, name=f"average_buffers.{op.name}", op=op, process_set=process_set
        )
        for tensors, op in ((inexact, Average), (exact, Max))
        if tensors
    ]
    for handle in handles:
        handle.wait()
