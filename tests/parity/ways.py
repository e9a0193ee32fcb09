"""Training in two ways, alone on the whole batch and together on a share of it each, must be the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hvdp.torch as hvd

BATCH = 12  # of all ranks together
STEPS = 5
SMALL_BUCKETS = {"HVDP_FUSION_THRESHOLD": "400"}


class Way:
    """One of the two ways to train: alone on the whole batch, or together on a share of it each."""

    def __init__(self, together: bool) -> None:
        self.size = hvd.size() if together else 1
        self.rank = hvd.rank() if together else 0
        self.together = together

    def share(self, batch: Tensor) -> Tensor:
        return batch.tensor_split(self.size)[self.rank]

    def wrap(self, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, **options) if self.together else optimizer


Train = Callable[[Way], Sequence[Tensor]]


def same(train: Train, tolerance: float = 1e-9) -> None:
    """What `train` returns is equal in both ways, and on all ranks to the last bit."""
    torch.manual_seed(4)
    alone = [value.detach().clone() for value in train(Way(together=False))]
    torch.manual_seed(4)
    together = [value.detach() for value in train(Way(together=True))]
    for index, (mine, whole) in enumerate(zip(together, alone, strict=True)):
        torch.testing.assert_close(
            mine, whole, rtol=tolerance, atol=tolerance, msg=lambda text, i=index: f"{i}: {text}"
        )
    equal_everywhere(together)


def equal_everywhere(values: Sequence[Tensor]) -> None:
    mine = [torch.view_as_real(v) if v.is_complex() else v.detach() for v in values]
    flat = torch.cat([value.reshape(-1).double() for value in mine])
    everyone = hvd.allgather(flat.unsqueeze(0))
    assert all(torch.equal(row, flat) for row in everyone), "the ranks differ"


def mlp(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, 8, bias), nn.Tanh(), nn.Linear(8, 8, bias), nn.Tanh(), nn.Linear(8, 3, bias)
    ).double()


def batches(steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(6)
    for _ in range(steps):
        yield (
            torch.randn(BATCH, 6, generator=random, dtype=torch.float64),
            torch.randn(BATCH, 3, generator=random, dtype=torch.float64),
        )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def plain_loop(
    way: Way, model: nn.Module, optimizer: Any, before_step: Callable[[], None] = lambda: None
) -> list[Tensor]:
    for inputs, targets in batches():

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(way.share(inputs)), way.share(targets))
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            before_step()
            optimizer.step()
        with torch.no_grad():
            model(inputs)
    return list(model.parameters())


def run_all(cases: list[Callable[[], None]]) -> None:
    """On a rank."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    hvd.init()
    for case in cases:
        case()
