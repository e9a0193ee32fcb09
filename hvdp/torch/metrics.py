"""`hvdp.metrics`, and torchmetrics objects over all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from hvdp._core.objects import allgather_object
from hvdp._core.runtime import runtime
from hvdp.errors import InvalidArgumentError
from hvdp.metrics import Accuracy, Mean, MeanSquaredError, Sum
from hvdp.process_sets import ProcessSet, global_process_set
from hvdp.torch._arrays import as_array, as_tensor, workspace

__all__ = ["Accuracy", "Mean", "MeanSquaredError", "Sum", "synced"]

MetricT = TypeVar("MetricT", bound=torch.nn.Module)


def synced(metric: MetricT, process_set: ProcessSet = global_process_set) -> MetricT:
    """Let a torchmetrics metric, or a collection of them, compute over all ranks; returns it.

    Its states are reduced over the ranks as it declares; `update` stays local, and `compute`
    becomes collective.

    Raises:
        InvalidArgumentError: it is no such metric.
    """
    parts: list[Any] = [part for part in metric.modules() if hasattr(part, "dist_sync_fn")]
    if not parts:
        raise InvalidArgumentError(f"synced() takes a torchmetrics.Metric. Received: {type(metric).__name__}")
    for part in parts:
        part.dist_sync_fn = partial(_gather, process_set)
        part.distributed_available_fn = partial(_shared, process_set)
    return metric


def _shared(process_set: ProcessSet) -> bool:
    runtime.require("metrics")
    return process_set.size() > 1


def _gather(process_set: ProcessSet, state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """All ranks' tensors; their shapes may differ."""
    arrays = allgather_object(as_array(workspace(state, copy=False)), "metrics.state", process_set.number())
    filled = [array for array in arrays if array.size]
    # Without samples a rank knows no dtype, and gives one that would turn integers into floats.
    dtype = filled[0].dtype if filled else arrays[0].dtype
    return [
        as_tensor(np.array(array, dtype if not array.size else array.dtype)).to(state.device)
        for array in arrays
    ]
