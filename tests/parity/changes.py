"""What changes in mid-run, with momentum, weight decay and clipping: cases of `test_torch_combined`."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hvdp.torch as hvd

from .ways import Way, batches, mlp, same

CLIP = 0.5
Change = Callable[[int, nn.Sequential, Any], None]


def _step(
    way: Way,
    model: nn.Module,
    optimizer: Any,
    batch: tuple[Tensor, Tensor],
    passes: int,
    to_none: bool = True,
) -> Tensor:
    """Returns the norm before clipping, of what the optimizer knows."""
    optimizer.zero_grad(set_to_none=to_none)
    for inputs, targets in zip(*(way.share(values).chunk(passes) for values in batch), strict=True):
        (F.mse_loss(model(inputs), targets) / passes).backward()
    known = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(known, CLIP)
    optimizer.step()
    return norm


def _changing(change: Change) -> None:
    """Also with gradients that are kept as zeros, by which decay and momentum go on for frozen ones."""
    for passes, to_none in ((1, True), (2, False)):

        def train(way: Way, passes: int = passes, to_none: bool = to_none) -> list[Tensor]:
            model = mlp()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer = torch.optim.SGD(model[:4].parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
            optimizer.add_param_group({"params": model[4].weight, "lr": 0.2})
            change(-1, model, optimizer)
            optimizer = way.wrap(optimizer, backward_passes_per_step=passes)
            norms = []
            for step, batch in enumerate(batches(8)):
                change(step, model, optimizer)
                norms.append(_step(way, model, optimizer, batch, passes, to_none))
                model[4].zero_grad()
            assert min(norms) < CLIP < max(norms), norms
            for old, parameter in zip(before, model.parameters(), strict=True):
                moved = (parameter - old).abs().max() > 1e-3
                assert moved == any(parameter is p for g in optimizer.param_groups for p in g["params"])
            return [*model.parameters(), *norms]

        same(train)


def frozen_later() -> None:
    """One layer for good, one for some steps."""

    def change(step: int, model: nn.Sequential, _: Any) -> None:
        model[0].requires_grad_(step < 3)
        model[2].weight.requires_grad_(step not in (2, 3, 4))

    _changing(change)


def unfrozen_later() -> None:
    def change(step: int, model: nn.Sequential, _: Any) -> None:
        model[2].requires_grad_(step >= 2)
        model[0].weight.requires_grad_(step >= 4)

    _changing(change)


def group_added_later() -> None:
    def change(step: int, model: nn.Sequential, optimizer: Any) -> None:
        if step == 3:
            optimizer.add_param_group({"params": model[4].bias, "momentum": 0.5})

    _changing(change)


def loaded_in_mid_run() -> None:
    """By all ranks, or by the first one, which then broadcasts; into the same model, or a fresh one."""

    def nesterov(parameters: Any, rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, nesterov=True, weight_decay=0.1)

    def adam(parameters: Any, rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=rate, amsgrad=True, weight_decay=0.1)

    for make, everyone, fresh, passes in (
        (nesterov, True, True, 1),
        (adam, True, False, 2),
        (nesterov, False, False, 2),
        (adam, False, True, 1),
    ):

        def train(
            way: Way, make: Any = make, everyone: bool = everyone, fresh: bool = fresh, passes: int = passes
        ) -> list[Tensor]:
            rate = 0.01 if way.together else 0.01 * hvd.size() * passes

            def made(model: nn.Module) -> tuple[Any, Any]:
                options = {"backward_passes_per_step": passes, "lr_scaling": "linear"}
                optimizer = way.wrap(make(model.parameters(), rate), **options)
                return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)

            model = mlp()
            optimizer, scheduler = made(model)
            stream = batches(6)
            norms = []
            for batch in islice(stream, 3):
                norms.append(_step(way, model, optimizer, batch, passes))
                scheduler.step()
            if way.together:
                file = io.BytesIO()
                torch.save([part.state_dict() for part in (model, optimizer, scheduler)], file)
                if fresh:
                    model = mlp()
                optimizer, scheduler = made(model)
                if everyone or way.rank == 0:
                    saved = torch.load(io.BytesIO(file.getvalue()))
                    for part, state in zip((model, optimizer, scheduler), saved, strict=True):
                        part.load_state_dict(state)
                if not everyone:
                    hvd.broadcast_parameters(model.state_dict())
                    hvd.broadcast_optimizer_state(optimizer)
                    scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict()))
            for batch in stream:
                norms.append(_step(way, model, optimizer, batch, passes))
                scheduler.step()
            return [*model.parameters(), *norms]

        same(train)


def hooks_that_come_after_wrapping() -> None:
    """On gradients, which they change before the average; and on accumulated ones, which they only see."""
    for passes in (1, 2):

        def train(way: Way, passes: int = passes) -> list[Tensor]:
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
            optimizer = way.wrap(optimizer, backward_passes_per_step=passes)
            seen: list[int] = []
            for index, parameter in enumerate(model.parameters()):
                parameter.register_hook(lambda gradient, factor=index + 1: gradient * factor)
                parameter.register_post_accumulate_grad_hook(
                    lambda p, index=index: seen.append(index if p.grad is not None else -1)
                )
            norms = [_step(way, model, optimizer, batch, passes) for batch in batches()]
            each = [index for index, _ in enumerate(model.parameters())]
            assert sorted(seen) == sorted(each * passes * len(norms))
            return [*model.parameters(), *norms]

        same(train)


CASES = [
    frozen_later,
    unfrozen_later,
    group_added_later,
    loaded_in_mid_run,
    hooks_that_come_after_wrapping,
]
