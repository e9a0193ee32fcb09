"""hvd.shard on torch's data: datasets of both kinds with workers, tensors, and disagreements."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import hvdp.torch as hvd
from hvdp.errors import InvalidArgumentError, MismatchError
from hvdp.testing import World, worlds


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> int:
        return index * index


class Letters(IterableDataset[str]):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[str]:
        yield from (f"{letter}{self.epoch}" for letter in "abcdefghijk")


def _start() -> tuple[int, int]:
    torch.set_num_threads(1)
    hvd.init()
    return hvd.rank(), hvd.size()


def _everybodys(items: list[Any]) -> list[Any]:
    return sorted(item for part in hvd.allgather_object(items) for item in part)


def map_style() -> None:
    _, size = _start()
    sampler = hvd.shard(Squares(), seed=2, pad=False)
    loader = DataLoader(Squares(), batch_size=2, sampler=sampler)
    epochs = [[int(x) for batch in loader for x in batch] for _ in range(3)]
    for own in epochs:
        assert _everybodys(own) == [i * i for i in range(11)]
        assert len(own) == len(sampler)
    assert epochs[0] != epochs[1] != epochs[2]
    resumed = DataLoader(Squares(), sampler=hvd.shard(Squares(), seed=2, pad=False, epoch=1))
    assert [int(x) for x in resumed] == epochs[1]
    sampler.set_epoch(0)
    assert [int(x) for batch in loader for x in batch] == epochs[0]
    padded = hvd.shard(Squares())
    real = [i for i, pads in zip(padded, padded.is_padding, strict=True) if not pads]
    assert _everybodys(real) == list(range(11))
    assert len(hvd.allgather_object(len(padded))) == size
    assert len(set(hvd.allgather_object(len(padded)))) == 1
    assert len(hvd.shard(Squares(), drop_last=True)) == 11 // size


def iterables() -> None:
    _start()
    wanted = [[f"{letter}{epoch}" for letter in "abcdefghijk"] for epoch in range(3)]
    for options in (
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
    ):
        loader = DataLoader(hvd.shard(Letters(), pad=False), batch_size=None, **options)
        assert [_everybodys(list(loader)) for _ in range(3)] == wanted
    even = [list(hvd.shard(Letters(), drop_last=drop)) for drop in (False, True)]
    for own in even:
        assert len(set(hvd.allgather_object(len(own)))) == 1
    assert sorted(set(_everybodys(even[0]))) == wanted[0]
    late = hvd.shard(Letters(), epoch=4, pad=False)
    assert _everybodys(list(late))[0] == "a4"
    assert _everybodys(list(hvd.shard(iter(range(7)), pad=False))) == list(range(7))


def iterables_count_before_their_first_element() -> None:
    """As a data-loader worker must that is stopped before it has come to one."""
    _start()
    letters = hvd.shard(Letters(), pad=False)
    for epoch in (1, 2):
        iter(letters)
        assert letters.epoch == epoch
        assert letters.data.epoch == epoch - 1
    assert _everybodys(list(letters))[0] == "a2"


class Counted(Letters):
    def __len__(self) -> int:
        return 11


def iterables_with_a_length() -> None:
    _start()
    for options in ({}, {"drop_last": True}, {"pad": False}):
        loader = DataLoader(hvd.shard(Counted(), **options), batch_size=2)
        assert len(list(loader)) == len(loader)
        assert len(loader.dataset) == len(list(hvd.shard(Counted(), **options)))
    with pytest.raises(TypeError):
        len(DataLoader(hvd.shard(Letters())))


def tensors() -> None:
    rank, size = _start()
    rows = torch.arange(22).reshape(11, 2)
    own = hvd.shard(rows, pad=False)
    assert torch.equal(own, rows[rank::size])
    images, labels = (hvd.shard(part, shuffle=True, seed=1, epoch=3) for part in (rows, rows[:, 0]))
    assert torch.equal(images[:, 0], labels)
    assert not torch.equal(labels, hvd.shard(rows[:, 0], shuffle=True, seed=1, epoch=4))
    assert isinstance(hvd.shard(np.arange(4)), np.ndarray)
    assert hvd.shard(["a", "b", "c"], pad=False) == ["a", "b", "c"][rank::size]
    assert len(hvd.shard(TensorDataset(rows), drop_last=True)) == 11 // size
    members = hvd.add_process_set([0])
    if rank == 0:
        assert torch.equal(hvd.shard(rows, process_set=members), rows)


def refuses() -> None:
    rank, _ = _start()
    for data, options in ((10 + rank, {}), (10, {"seed": rank}), (10, {"drop_last": rank == 1})):
        with pytest.raises(MismatchError, match="rank 0 has 10 elements") as caught:
            hvd.shard(data, **options)
        assert "rank 1 has" in str(caught.value)
    with pytest.raises(InvalidArgumentError, match="rank 1: needs a dataset"):
        hvd.shard(None if rank == 1 else Letters())
    with pytest.raises(InvalidArgumentError, match="shard each by itself"):
        hvd.shard((torch.zeros(2), torch.zeros(2)))
    with pytest.raises(InvalidArgumentError):
        hvd.shard({"x": torch.zeros(2)})
    hvd.barrier()


def _trained(*loaders: Any, steps: int) -> None:
    """Steps of a DistributedOptimizer, while these loaders exist, and one that tells what it has seen."""
    model = torch.nn.Linear(1, 1)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for step in range(steps + 1):
        for loader in loaders if step < steps else ():
            next(iter(loader))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()


def _warnings_of(call: Callable[[], object]) -> list[str]:
    """What the drift watch logs meanwhile."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hvdp.torch.consistency")
    logger.addHandler(handler)
    try:
        call()
    finally:
        logger.removeHandler(handler)
    return texts


def epochs_of_one_rank_alone() -> None:
    rank, size = _start()
    told = f"rank 0 in 3, {', '.join(f'rank {other} in 2' for other in range(1, size))}"
    for data, other, workers in (
        (hvd.shard(Squares()), hvd.shard(Squares()), 0),
        (hvd.shard(Letters()), hvd.shard(Letters()), 0),
        (hvd.shard(Letters()), hvd.shard(Letters()), 1),
    ):
        loaders = [
            DataLoader(each, num_workers=workers)
            if isinstance(each, IterableDataset)
            else DataLoader(Squares(), sampler=each)
            for each in (data, other)
        ]
        _trained(*loaders, steps=1)
        if rank == 0:
            next(iter(loaders[1]))
        warnings = _warnings_of(lambda: _trained(*loaders, steps=1))  # noqa: B023 - called at once
        assert [told in text for text in warnings] == [True] * (rank == 0), warnings
        with pytest.raises(MismatchError, match=told):
            hvd.check_consistency(torch.nn.Flatten())
        other.set_epoch(2)
        hvd.check_consistency(torch.nn.Flatten())


def a_look_at_epochs_makes_no_rank_wait() -> None:
    """For the step of another optimizer, which only some ranks' backward has reduced already."""
    rank, size = _start()
    shard = hvd.shard(5)
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    first, second = (hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0)) for p in (a, b))
    for step in range(5):
        first.zero_grad()
        second.zero_grad()
        (a + b if rank == 0 or step == 0 else a).sum().backward()
        first.step()
        second.step()
    assert shard.epoch == 0
    torch.testing.assert_close(a.detach(), torch.tensor([-5.0]))
    torch.testing.assert_close(b.detach(), torch.tensor([-1.0 - 4.0 / size]))


def epochs_that_need_not_agree() -> None:
    """Shards of other process sets, and those that some ranks have forgotten."""
    rank, _ = _start()
    members = hvd.add_process_set([0])
    kept = [hvd.shard(5), hvd.shard(5)]
    if rank == 0:
        alone = hvd.shard(5, process_set=members)
        list(alone)
        list(kept[0])
    else:
        del kept[0]
    _trained(steps=4)
    if rank == 1:
        kept[0].set_epoch(7)
    warnings = _warnings_of(lambda: _trained(steps=1))
    assert ["rank 0 in 0, rank 1 in 7" in text for text in warnings] == [True] * (rank == 0), warnings


def uneven_epochs_with_a_join() -> None:
    """Ranks with more samples go on alone; each step is that of one process on what the others still have."""
    rank, size = _start()
    data = torch.randn(11, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight, alone = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
    plain = torch.optim.SGD([alone], lr=0.1, momentum=0.9)
    loader = DataLoader(range(11), sampler=hvd.shard(TensorDataset(data), pad=False))
    for _ in range(2):
        seen = []
        for (index,) in loader:
            seen.append(int(index))
            optimizer.zero_grad()
            (data[index] @ weight - 1).square().backward()
            optimizer.step()
        assert len(seen) == len(range(rank, 11, size))
        last = hvd.join()
        hvd.broadcast_parameters([("weight", weight)], root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        assert _everybodys(seen) == list(range(11))
        everyone = hvd.allgather_object(seen)
        for step in range(len(everyone[0])):
            plain.zero_grad()
            batch = data[[theirs[step] for theirs in everyone if step < len(theirs)]]
            (batch @ alone - 1).square().mean().backward()
            plain.step()
        torch.testing.assert_close(weight, alone, rtol=1e-9, atol=1e-9)


def _run_all() -> None:
    map_style()
    tensors()
    refuses()
    iterables()
    iterables_count_before_their_first_element()
    iterables_with_a_length()
    epochs_of_one_rank_alone()
    a_look_at_epochs_makes_no_rank_wait()
    epochs_that_need_not_agree()
    uneven_epochs_with_a_join()


@pytest.mark.parametrize("world", worlds(shm=(2, 3)), ids=str)
def test_shard(world: World) -> None:
    world.run(_run_all)
