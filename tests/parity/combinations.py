"""Options and habits combined, where each alone is right: cases of `test_torch_combined`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hvdp.torch as hvd

from .ways import BATCH, Way, batches, mlp, same

FULL = (2, 2, 2, 2)
TAILS = (2, 1, 2, 2, 1)
CLIP = 0.6

OPTIONS: tuple[dict[str, Any], ...] = (
    {"gradient_predivide_factor": 3.0},
    {"num_groups": 2},
    {"op": hvd.Sum},
    {"weighted": True},
    {"weighted": True, "num_groups": 2, "gradient_predivide_factor": 0.5},
    {"op": hvd.Sum, "num_groups": 3},
)


def _accumulated(plan: Sequence[int], options: dict[str, Any], synchronizes: bool) -> None:
    """Steps of so many passes each, of Adam after clipping; gradients' norms are compared, too.

    By them it is seen what Adam hides: a factor that all gradients have.
    """

    def train(way: Way) -> list[Tensor]:
        model = mlp()
        optimizer = way.wrap(
            torch.optim.Adam(model.parameters(), lr=0.05), backward_passes_per_step=2, **options
        )
        norms = []
        stream = enumerate(batches(sum(plan)))
        for step, passes in enumerate(plan):
            parts = [_part(way, *numbered, "weighted" in options) for numbered in islice(stream, passes)]
            samples = sum(len(inputs) for inputs, _ in parts)
            if way.together and "weighted" in options:
                optimizer.set_weight(samples)
            share = max(1, samples) * 3 * (way.size if "op" in options else 1)
            for inputs, targets in parts:
                (F.mse_loss(model(inputs), targets, reduction="sum") / share).backward()
            if way.together and synchronizes:
                optimizer.synchronize()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(step % 2))
        assert min(norms) < CLIP < max(norms), norms
        return [*model.parameters(), *norms]

    same(train, 1e-7)


def _part(way: Way, number: int, batch: tuple[Tensor, Tensor], uneven: bool) -> list[Tensor]:
    """This rank's samples; of uneven parts another rank has the most, or none, in every second pass."""
    if not uneven or not way.together:
        return [way.share(values) for values in batch]
    counts = [8, 4] if way.size == 2 else [8, 0, 4]
    turned = number // 2 % way.size
    counts = counts[turned:] + counts[:turned]
    assert sum(counts) == BATCH
    return [values.split(counts)[way.rank] for values in batch]


def passes_of_a_step_with_other_options() -> None:
    for options in OPTIONS:
        _accumulated(FULL, options, synchronizes=False)


def tails_of_an_epoch() -> None:
    """The passes of a step do not divide the batches: synchronize() comes before clipping."""
    for options in ({}, *OPTIONS[2:5]):
        _accumulated(TAILS, options, synchronizes=True)


def grad_scaler_of_a_fused_optimizer() -> None:
    """It unscales within its step, and skips that itself; the inf is the last rank's alone."""
    for passes, bad_pass in ((1, 0), (2, 0), (2, 1)):

        def train(way: Way, passes: int = passes, bad_pass: int = bad_pass) -> list[Tensor]:
            model = mlp().float()
            optimizer = way.wrap(
                torch.optim.AdamW(model.parameters(), lr=0.02, fused=True), backward_passes_per_step=passes
            )
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
            stream = batches(5 * passes)
            scales = []
            for step in range(5):
                optimizer.zero_grad()
                for turn, (inputs, targets) in enumerate(islice(stream, passes)):
                    loss = F.mse_loss(model(way.share(inputs).float()), way.share(targets).float()) / passes
                    if step == 2 and turn == bad_pass and way.rank == way.size - 1:
                        loss = loss * float("inf")
                    scaler.scale(loss).backward()
                before = [p.detach().clone() for p in model.parameters()]
                scaler.step(optimizer)
                scaler.update()
                moved = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
                assert moved == [step != 2] * len(moved)
                scales.append(scaler.get_scale())
            assert scales == [256.0, 512.0, 256.0, 256.0, 512.0]
            assert all(state["step"] == 4 for state in optimizer.state.values())
            return list(model.parameters())

        same(train, 1e-4)


CASES = [passes_of_a_step_with_other_options, tails_of_an_epoch, grad_scaler_of_a_fused_optimizer]
