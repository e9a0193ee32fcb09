"""`hvd.shard` for torch: datasets of both kinds, tensors, and all that `hvdp.shard` takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hvdp import sharding
from hvdp._core.arrays import Array
from hvdp.epochs import watch
from hvdp.errors import InvalidArgumentError
from hvdp.process_sets import ProcessSet, global_process_set
from hvdp.sharding import Partition, Shard, ShardOptions, agreed_partition

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ShardedIterable", "shard"]

_MOST_WORKERS = 1024


class ShardedIterable(IterableDataset[Any]):
    """This rank's elements of an iterable dataset; with data-loader workers, each takes its part of them.

    Every iteration is of the next epoch, which a dataset with a method `set_epoch` is told.

    Args:
        data: yields all elements, in the same order on every rank and in every worker: it must
            not divide them among workers itself.
    """

    def __init__(self, data: Any, partition: Partition, epoch: int = 0) -> None:
        self.data = data
        self.partition = partition
        # Workers may end after every epoch, so they count in memory that is not theirs alone.
        self._epochs = torch.zeros(1 + _MOST_WORKERS, dtype=torch.int64)
        self._epochs.share_memory_()  # type: ignore[no-untyped-call]
        self.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """The one that the next iteration is of: what a checkpoint has to remember."""
        # The first worker starts before the others.
        return int(self._epochs[:2].max())

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of this epoch, after a checkpoint; else never needed."""
        self._epochs.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        # No generator: a worker that is stopped before its first element must have counted, too.
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if workers > _MOST_WORKERS:
            raise InvalidArgumentError(f"at most {_MOST_WORKERS} workers. Received: {workers}")
        slot = 0 if worker is None else 1 + number
        epoch = int(self._epochs[slot])
        self._epochs[slot] = epoch + 1
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        return self.partition.pick(self.data, number, workers)


class _SizedIterable(ShardedIterable):
    """Of data that knows its length. A class of its own: to have `__len__` is to be asked for it."""

    def __len__(self) -> int:
        return self.partition.count(len(self.data))


@overload
def shard(data: int, **options: Unpack[ShardOptions]) -> Shard: ...
@overload
def shard(data: torch.Tensor, **options: Unpack[ShardOptions]) -> torch.Tensor: ...
@overload
def shard(  # type: ignore[overload-overlap]
    data: IterableDataset[Any], **options: Unpack[ShardOptions]
) -> ShardedIterable: ...
@overload
def shard(data: Dataset[Any], **options: Unpack[ShardOptions]) -> Shard: ...
@overload
def shard(data: Array, **options: Unpack[ShardOptions]) -> Array: ...
@overload
def shard(data: Any, **options: Unpack[ShardOptions]) -> Any: ...
def shard(
    data: Any,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = False,
    pad: bool = True,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """This rank's part of the data: no element on two ranks; collective.

        map-style dataset   a Shard, the sampler: DataLoader(dataset, sampler=hvd.shard(dataset))
        iterable            a dataset: DataLoader(hvd.shard(dataset)), with workers or without
        a length            a Shard: this rank's indices, in a new order each time it is iterated
        tensor, array,      its rows or elements; give tensors that belong together one by one
        list, tuple

    Each iteration is of the next epoch by itself; `set_epoch` is for going on from a checkpoint.

    Args:
        shuffle: by default datasets and lengths are shuffled, tensors and sequences keep their
            order; iterables cannot be shuffled.
        seed: of the order; equal on all ranks.
        epoch: the first one, or for tensors and sequences the one to take.
        drop_last: leave out up to `size - 1` elements, so that all ranks have equally many.
        pad: else repeat some, and say which (`Shard.is_padding`). With neither some ranks
            have one more: for evaluation, or with `join`.

    Raises:
        MismatchError: lengths or options differ between ranks; on every rank.
        InvalidArgumentError: the data is of another kind, or an option cannot be meant.
    """
    options: ShardOptions = {
        "shuffle": (_is_map_style(data) or isinstance(data, int)) if shuffle is None else shuffle,
        "seed": seed,
        "epoch": epoch,
        "drop_last": drop_last,
        "pad": pad,
        "process_set": process_set,
    }
    if isinstance(data, torch.Tensor):
        indices = sharding.shard(len(data) if data.dim() else 0, **options)
        return data[torch.from_numpy(indices.indices(epoch)).to(data.device)]
    if _is_map_style(data):
        return sharding.shard(len(data), **options)
    if isinstance(data, int) or hasattr(data, "shape") or _is_sequence(data):
        return sharding.shard(data, **options)
    known = hasattr(data, "__iter__") and not isinstance(data, Mapping)
    fault = "" if known else f"needs a dataset, a tensor or an iterable. Received: {type(data).__name__}"
    partition = agreed_partition(None, bool(shuffle), seed, epoch, drop_last, pad, process_set, fault)
    kind = _SizedIterable if hasattr(data, "__len__") else ShardedIterable
    sharded = kind(data, partition, epoch)
    watch(sharded, process_set.number())
    return sharded


def _is_map_style(data: Any) -> bool:
    """Datasets by what they can do: many are no subclass of torch's."""
    return (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, IterableDataset | Mapping)
        and not hasattr(data, "shape")
        and not _is_sequence(data)
    )


def _is_sequence(data: Any) -> bool:
    return isinstance(data, list | tuple | range | str | bytes)
