"""What tests of the torch optimizer start with: parameters of one element, steps of rate 1."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import hvdp.torch as hvd

SMALL_BUCKETS = {"HVDP_FUSION_THRESHOLD": "64"}


def start() -> tuple[int, int, float]:
    """Rank, size, and the average of rank + 1 over the ranks."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.manual_seed(3)
    hvd.init()
    return hvd.rank(), hvd.size(), (hvd.size() + 1) / 2


def two() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))


def sgd(parameters: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), **options)
