"""Ranks that count by what they give to `set_weight`: cases of `test_torch_windows`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hvdp.torch as hvd
from hvdp.errors import InvalidArgumentError

from .small import sgd, start, two


def gradients_of_ranks_without_weight() -> None:
    """A parameter that only they use is not used."""
    rank, size, _ = start()
    for everyone in (False, True):
        a, b = two()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW([a, b], lr=0.1, weight_decay=0.5), weighted=True
        )
        nobody = rank == size - 1 or everyone
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.set_weight(0 if nobody else 2)
            (a.sum() + b.sum() if rank == size - 1 else a.sum()).backward()
            assert b.grad is None
            assert (a.grad is None) == everyone
            optimizer.step()
        assert len(set(hvd.allgather_object(float(a.detach())))) == 1
    words = nn.Embedding(3, 1, sparse=True)
    optimizer = sgd(words.parameters(), weighted=True)
    for last in (0, size - 1):
        optimizer.zero_grad()
        optimizer.set_weight(0 if rank == last else 2)
        (words(torch.tensor([rank])).sum() * (float("nan") if rank == last else 1.0)).backward()
        gradient = words.weight.grad.to_dense().flatten()[:size]
        assert gradient.isfinite().all()
        assert (gradient > 0).tolist() == [member != last for member in range(size)]
        optimizer.step()


def many_samples_of_16_bit_embeddings() -> None:
    """More than such floats can count."""
    rank, _, mean = start()
    for dtype in (torch.float16, torch.bfloat16):
        words = nn.Embedding(3, 1, sparse=True, dtype=dtype)
        optimizer = sgd(words.parameters(), weighted=True)
        for weight in (70_000, 1):
            optimizer.zero_grad()
            optimizer.set_weight(weight)
            (words(torch.tensor([1])) * (32 * (rank + 1))).sum().backward()
            assert words.weight.grad.dtype is dtype
            assert words.weight.grad.to_dense().tolist() == [[0], [32 * mean], [0]]
            optimizer.step()


def one_weight_for_all_passes_of_a_step() -> None:
    rank, size, _ = start()
    a, _ = two()
    optimizer = sgd([a], weighted=True, backward_passes_per_step=2)
    counts = [(1, 3), (3, 4), (0, 2)][rank]
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.set_weight(sum(counts))
        for turn, count in enumerate(counts):
            # Each sample's slope is 10 to the power of the pass.
            (a * (10.0**turn * count / sum(counts))).sum().backward()
        everyone = [(1, 3), (3, 4), (0, 2)][:size]
        total = sum(x + 10 * y for x, y in everyone) / sum(x + y for x, y in everyone)
        torch.testing.assert_close(a.grad, torch.tensor([total]))
        optimizer.step()
    a.sum().backward()
    with pytest.raises(InvalidArgumentError, match="the samples of the whole step"):
        optimizer.set_weight(99)
    optimizer.set_weight(sum(counts))
    optimizer.step()


def a_weight_that_comes_too_late() -> None:
    rank, size, _ = start()
    a, _ = two()
    optimizer = sgd([a], weighted=True)
    for step in range(2):
        optimizer.zero_grad()
        optimizer.set_weight(rank + 1 + step)
        (a * (rank + 1.0)).sum().backward()
        optimizer.set_weight(rank + 1 + step)
        optimizer.step()
    at = a.item()
    a.sum().backward()
    optimizer.set_weight(rank + 9)
    with pytest.raises(
        InvalidArgumentError, match=rf"set_weight\({rank + 9}.*weight {rank + 2}.*before backward"
    ):
        optimizer.step()
    assert a.item() == at
    optimizer.zero_grad()
    (a * (rank + 1.0)).sum().backward()
    optimizer.step()
    weights = torch.arange(size) + 9.0
    torch.testing.assert_close(
        a.grad.item(), ((torch.arange(size) + 1) * weights).sum().item() / weights.sum().item()
    )
    for wrong in (float("inf"), float("nan"), -1):
        with pytest.raises(InvalidArgumentError, match="finite number that is not negative"):
            optimizer.set_weight(wrong)


CASES = [
    gradients_of_ranks_without_weight,
    many_samples_of_16_bit_embeddings,
    one_weight_for_all_passes_of_a_step,
    a_weight_that_comes_too_late,
]
