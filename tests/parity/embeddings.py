"""Sparse gradients where some rank has nothing to look up: cases of `test_torch_combined`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hvdp.torch as hvd

from .ways import BATCH, STEPS, Way, same


def _looked_up(way: Way, make: Any, empty: Callable[[int], int], silent: int, passes: int) -> list[Tensor]:
    """Words, and means of bags of them, of which number 0 is padding.

    Rank `empty(step)` has no words in the step's first pass; in steps 0, 2, ... (`silent` 0) or
    1, 3, ... (`silent` 1) not even a backward.
    """
    torch.manual_seed(5)
    words = nn.Embedding(10, 3, padding_idx=0, sparse=True).double()
    bags = nn.EmbeddingBag(10, 3, mode="mean", padding_idx=0, sparse=True).double()
    before = [table.weight.detach().clone() for table in (words, bags)]
    optimizer = way.wrap(make([words.weight, bags.weight], lr=0.1), backward_passes_per_step=passes)
    random = torch.Generator().manual_seed(6)
    for step in range(STEPS):
        optimizer.zero_grad()
        for turn in range(passes):
            shares = list(torch.randint(0, 10, (BATCH, 4), generator=random).tensor_split(hvd.size()))
            if turn == 0:
                shares[empty(step)] = shares[empty(step)][:0]
            mine = shares[way.rank] if way.together else torch.cat(shares)
            if len(mine) or step % 2 != silent:
                bag = bags(mine.reshape(-1), torch.arange(0, mine.numel(), 4)).sin().sum()
                loss = words(mine).square().sum() + bag
                (loss * way.size / BATCH / passes).backward()
        optimizer.step()
    for table, old in zip((words, bags), before, strict=True):
        assert torch.equal(table.weight[0], old[0])
        assert not table.weight[1:].isclose(old[1:], atol=1e-3).any()
    return [words.weight, bags.weight]


def embeddings_of_which_a_rank_has_none() -> None:
    first, each_in_turn = (lambda step: 0), (lambda step: step % hvd.size())
    for make, empty, silent, passes in (
        (torch.optim.SGD, first, 0, 1),
        (torch.optim.SparseAdam, first, 1, 1),
        (torch.optim.SGD, each_in_turn, 1, 1),
        (torch.optim.SparseAdam, each_in_turn, 0, 1),
        (torch.optim.SparseAdam, first, 0, 2),
        (torch.optim.SGD, each_in_turn, 0, 2),
    ):
        same(lambda way: _looked_up(way, make, empty, silent, passes))  # noqa: B023 - called at once


def _used_late(way: Way, make: Any) -> list[Tensor]:
    """Only the first of three tables has a gradient before the third step, the others from then on."""
    torch.manual_seed(5)
    tables = [nn.Embedding(10, 3, sparse=True).double() for _ in range(3)]
    tables[2].weight.requires_grad_(False)
    optimizer = way.wrap(make([table.weight for table in tables], lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        words = torch.arange(BATCH).add(step).remainder(10)
        used = tables[1:] if step >= 2 else tables[:1]
        if step == 2:
            tables[2].weight.requires_grad_(True)
        sum(table(way.share(words)).square().sum(1).mean() for table in used).backward()
        optimizer.step()
    return [table.weight for table in tables]


def embeddings_that_no_rank_uses_at_first() -> None:
    for make in (torch.optim.SparseAdam, torch.optim.SGD):
        same(lambda way: _used_late(way, make))  # noqa: B023 - called at once


class _Sparse(torch.autograd.Function):
    """The sum of a matrix, whose gradient is sparse in so many dimensions."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, dimensions: int) -> Tensor:
        ctx.dimensions, ctx.shape = dimensions, matrix.shape
        return matrix.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient * torch.ones(ctx.shape).double()).to_sparse(ctx.dimensions), None


def sparse_dimensions_that_differ() -> None:
    """Between ranks, and from step to step."""
    matrix = nn.Parameter(torch.zeros(3, 2).double())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([matrix], lr=1.0))
    for step in range(1, 4):
        optimizer.zero_grad()
        (_Sparse.apply(matrix, 1 + (hvd.rank() + step) % 2) * (hvd.rank() + 1)).backward()
        optimizer.step()
        torch.testing.assert_close(matrix, torch.full_like(matrix, -step * (hvd.size() + 1) / 2))


CASES = [
    embeddings_of_which_a_rank_has_none,
    embeddings_that_no_rank_uses_at_first,
    sparse_dimensions_that_differ,
]
