"""Frozen parameters cost nothing, and are reduced as soon as a rank has unfrozen them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hvdp.torch as hvd
from hvdp.testing import World, worlds

from .small import sgd, start

SMALL_BUCKETS = {"HVDP_FUSION_THRESHOLD": "512"}


def _reduced_elements(optimizer: Any) -> int:
    return sum(slot.count for bucket in optimizer._reducer._bucketing.buckets for slot in bucket.plan.slots)


def unfrozen_later() -> None:
    """By all ranks, from the head down; then by one rank alone."""
    rank, size, mean = start()
    for options in ({}, {"backward_passes_per_step": 2}, {"num_groups": 2}, {"op": hvd.Sum}):
        layers = [nn.Parameter(torch.zeros(count), requires_grad=count == 3) for count in (9, 200, 70, 3)]
        table = nn.Parameter(torch.arange(3), requires_grad=False)
        optimizer = sgd([*layers, table], **options)
        wanted = mean * (size if "op" in options else 1)
        passes = options.get("backward_passes_per_step", 1)

        def step(optimizer: Any = optimizer, layers: Any = layers, passes: int = passes) -> None:
            optimizer.zero_grad()
            for _ in range(passes):
                (sum(layer.sum() for layer in layers) * (rank + 1) / passes).backward()
            optimizer.step()

        for count, unfreezing in ((3, None), (3, None), (73, 2), (273, 1)):
            if unfreezing is not None:
                layers[unfreezing].requires_grad_()
            step()
            assert _reduced_elements(optimizer) == count
        for layer, steps in zip(layers, (0, 1, 2, 4), strict=True):
            assert (layer == -wanted * steps).all()
        layers[0].requires_grad_(rank == 0)
        step()
        assert (layers[0] == -wanted / mean / size).all()
        assert _reduced_elements(optimizer) == 282
        assert table.tolist() == [0, 1, 2]


def while_a_rank_has_joined() -> None:
    """It has no such bucket, and comes back."""
    rank, size, mean = start()
    a, b = (nn.Parameter(torch.zeros(3), requires_grad=trains) for trains in (True, False))
    optimizer = sgd([a, b])

    def step() -> None:
        optimizer.zero_grad()
        ((a + b) * (rank + 1)).sum().backward()
        optimizer.step()

    step()
    b.requires_grad_()
    if rank:
        step()
        assert (b == -(mean * size - 1) / (size - 1)).all()
    hvd.join()
    with torch.no_grad():
        a.zero_()
        b.zero_()
    for turn in range(2):
        step()
        assert (b == -mean * (turn + 1)).all()
        assert (a == b).all()


def by_a_rank_that_does_not_count() -> None:
    rank, _, _ = start()
    a, b = (nn.Parameter(torch.zeros(1), requires_grad=trains) for trains in (True, False))
    optimizer = sgd([a, b], weighted=True)
    for turn in range(3):
        b.requires_grad_(turn > 0 and rank == 0)
        optimizer.zero_grad()
        optimizer.set_weight(rank)
        (a + b).sum().backward()
        optimizer.step()
        assert b.item() == 0
        assert a.item() == -(turn + 1)


def sparse_or_all_frozen() -> None:
    rank, _, mean = start()
    words = nn.Embedding(4, 1, sparse=True)
    nn.init.zeros_(words.weight)
    words.weight.requires_grad_(False)
    a = nn.Parameter(torch.zeros(1))
    optimizer = sgd([a, words.weight])
    for turn in range(3):
        words.weight.requires_grad_(turn > 0)
        optimizer.zero_grad()
        ((a + words(torch.tensor([2]))) * (rank + 1)).sum().backward()
        optimizer.step()
        assert words.weight.flatten().tolist() == [0, 0, -mean * turn, 0]
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer = sgd([frozen])
    optimizer.step()
    frozen.requires_grad_()
    (frozen * (rank + 1)).sum().backward()
    optimizer.step()
    assert frozen.item() == -mean


CASES = [unfrozen_later, while_a_rank_has_joined, by_a_rank_that_does_not_count, sparse_or_all_frozen]


def _run_all() -> None:
    for case in CASES:
        case()


@pytest.mark.parametrize("world", worlds(shm=(3,)), ids=str)
def test_frozen(world: World) -> None:
    world.run(_run_all, env=SMALL_BUCKETS, timeout=100)
