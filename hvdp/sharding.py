"""Which elements of the data are whose.

The elements are put into one order, the same on all ranks, and rank r of n takes every n-th
of them from the r-th on. So no two ranks share an element, and what the ranks take in one
step with batches of B is what one process would take with a batch of n * B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, overload

import numpy as np

from hvdp._core.arrays import Array
from hvdp._core.objects import allgather_object
from hvdp._core.runtime import runtime
from hvdp.epochs import watch
from hvdp.errors import InvalidArgumentError, MismatchError
from hvdp.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Partition", "Shard", "ShardOptions", "Stream", "agreed_partition", "order", "shard"]

T = TypeVar("T")


def order(length: int, epoch: int = 0, seed: int = 0, shuffle: bool = True) -> Array:
    """The order of `length` elements in an epoch: another one for each seed and epoch."""
    if not shuffle:
        return np.arange(length)
    return np.random.default_rng([seed, epoch]).permutation(length)


@dataclass(frozen=True)
class Partition:
    """The share of one rank, and what becomes of elements left over.

    Attributes:
        drop_last: up to `size - 1` elements at the end are nobody's.
        pad: or some elements come twice, so that all ranks have equally many. Neither: the
            first ranks have one more.
    """

    rank: int
    size: int
    drop_last: bool = False
    pad: bool = True

    def count(self, length: int) -> int:
        """How many of `length` elements the rank takes."""
        whole, left = divmod(length, self.size)
        more = left > 0 if self.pad else left > self.rank
        return whole if self.drop_last else whole + more

    def of(self, elements: Array) -> Array:
        """The rank's elements; padding repeats elements from the start."""
        own = elements[self.rank :: self.size][: self.count(len(elements))]
        missing = self.count(len(elements)) - len(own)
        return np.concatenate([own, elements[[self.rank % len(elements)]]]) if missing else own

    def is_padding(self, length: int) -> Array:
        """For each of the rank's elements, whether another rank counts it already."""
        positions = np.arange(self.count(length)) * self.size + self.rank
        return positions >= length

    def pick(self, items: Iterable[T], worker: int = 0, workers: int = 1) -> Iterator[T]:
        """The rank's elements of a stream of unknown length; of these, each worker takes every `workers`-th.

        Padding repeats elements of the last round.
        """
        stream = iter(items)
        number = 0
        while group := list(islice(stream, self.size)):
            whole = len(group) == self.size
            takes = whole or (not self.drop_last and (self.pad or self.rank < len(group)))
            if takes and number % workers == worker:
                yield group[self.rank % len(group)]
            number += 1


class Shard:
    """The indices of this rank; iterating gives an epoch's, and the next time the next epoch's.

    A sampler for a torch DataLoader, and a plain iterable of ints. All ranks iterate it
    equally often, so their epochs stay in step by themselves (`hvdp.epochs` looks after that).

    Args:
        length: how many elements there are on all ranks together.

    Attributes:
        epoch: the one that the next iteration is of: what a checkpoint has to remember.
    """

    def __init__(
        self, length: int, partition: Partition, seed: int = 0, shuffle: bool = True, epoch: int = 0
    ) -> None:
        self.length = length
        self.partition = partition
        self.seed = seed
        self.shuffle = shuffle
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of this epoch, after a checkpoint; else never needed."""
        if epoch < 0:
            raise InvalidArgumentError(f"epoch must not be negative. Received: {epoch}")
        self.epoch = epoch

    def indices(self, epoch: int) -> Array:
        """This rank's indices in an epoch."""
        return self.partition.of(order(self.length, epoch, self.seed, self.shuffle))

    @property
    def is_padding(self) -> Array:
        """For each position of an epoch, whether another rank counts that element already; bools."""
        return self.partition.is_padding(self.length)

    def __len__(self) -> int:
        return self.partition.count(self.length)

    def __iter__(self) -> Iterator[int]:
        # A generator: an iterator that is made and not used takes no epoch.
        epoch, self.epoch = self.epoch, self.epoch + 1
        yield from self.indices(epoch).tolist()


class Stream(Generic[T]):
    """This rank's elements of an iterable of unknown length."""

    def __init__(self, data: Iterable[T], partition: Partition) -> None:
        self.data = data
        self.partition = partition

    def __iter__(self) -> Iterator[T]:
        return self.partition.pick(self.data)


class ShardOptions(TypedDict, total=False):
    """What `shard` takes beside the data."""

    shuffle: bool | None
    seed: int
    epoch: int
    drop_last: bool
    pad: bool
    process_set: ProcessSet


@overload
def shard(data: int, **options: Unpack[ShardOptions]) -> Shard: ...
@overload
def shard(  # type: ignore[overload-overlap]
    data: Array, **options: Unpack[ShardOptions]
) -> Array: ...
@overload
def shard(  # type: ignore[overload-overlap]
    data: Sequence[T], **options: Unpack[ShardOptions]
) -> list[T]: ...
@overload
def shard(data: Iterable[T], **options: Unpack[ShardOptions]) -> Stream[T]: ...
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

        a length            a Shard: this rank's indices, in a new order each time it is iterated
        array or sequence   its rows or elements; give arrays that belong together one by one
        other iterable      every size-th element

    Args:
        shuffle: by default lengths are shuffled, arrays and sequences keep their order;
            iterables cannot be shuffled.
        seed: of the order; equal on all ranks.
        epoch: the first one, or for arrays and sequences the one to take.
        drop_last: leave out up to `size - 1` elements, so that all ranks have equally many.
        pad: else repeat some, and say which (`Shard.is_padding`). With neither some ranks
            have one more: for evaluation, or with `join`.

    Raises:
        MismatchError: lengths or options differ between ranks; on every rank.
        InvalidArgumentError: the data is of another kind, or an option cannot be meant.
    """
    kind, fault = _kind(data)
    length = None
    if not fault:
        length = data if kind == "length" else len(data) if kind in ("array", "sequence") else None
    default = kind == "length"
    shuffle = default if shuffle is None else shuffle
    partition = agreed_partition(length, shuffle, seed, epoch, drop_last, pad, process_set, fault)
    if length is None:
        return Stream(data, partition)
    indices = Shard(length, partition, seed, shuffle, epoch)
    if kind == "length":
        watch(indices, process_set.number())
        return indices
    if kind == "array":
        return data[indices.indices(epoch)]
    return [data[index] for index in indices.indices(epoch).tolist()]


def agreed_partition(
    length: int | None,
    shuffle: bool,
    seed: int,
    epoch: int,
    drop_last: bool,
    pad: bool,
    process_set: ProcessSet,
    fault: str = "",
) -> Partition:
    """This rank's Partition, once all ranks have said the same; collective.

    Args:
        length: None where it is not known.
        fault: why this rank's data is wrong; told to every rank.
    """
    fault = fault or _option_fault(length, shuffle, seed, epoch)
    what = "a stream" if length is None else f"{length} elements"
    told = f"{what}, shuffle={shuffle}, seed={seed}, epoch={epoch}, drop_last={drop_last}, pad={pad}"
    everything = allgather_object((fault, told), "shard", process_set.number())
    ranks = runtime.require("shard").group(process_set.number()).ranks
    faults = [f"rank {rank}: {text}" for rank, (text, _) in zip(ranks, everything, strict=True) if text]
    if faults:
        raise InvalidArgumentError(f"shard: {'; '.join(faults)}")
    for rank, (_, theirs) in zip(ranks, everything, strict=True):
        if theirs != everything[0][1]:
            raise MismatchError(
                "shard: the ranks must pass the same, or they would share elements: "
                f"rank {ranks[0]} has {everything[0][1]}; rank {rank} has {theirs}."
            )
    return Partition(process_set.rank(), process_set.size(), drop_last, pad)


def _kind(data: Any) -> tuple[str, str]:
    """What the data is, and why it cannot be divided or ""."""
    if isinstance(data, int) and not isinstance(data, bool):
        return "length", ""
    if hasattr(data, "shape") and hasattr(data, "__getitem__"):
        return "array", "" if len(data.shape) else "an array without dimensions has no elements"
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        if isinstance(data, tuple) and any(hasattr(item, "shape") for item in data):
            return "sequence", "of a tuple of arrays shard each by itself: x, y = hvd.shard(x), hvd.shard(y)"
        return "sequence", ""
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping):
        return "iterable", ""
    return "iterable", f"needs a length, an array, a sequence or an iterable. Received: {type(data).__name__}"


def _option_fault(length: int | None, shuffle: bool, seed: int, epoch: int) -> str:
    """What is wrong with the options, or ""."""
    if length is None and shuffle:
        return "an iterable comes in its own order: leave shuffle out, and shuffle in the data"
    if length is not None and length < 0:
        return f"a length must not be negative. Received: {length}"
    if not isinstance(seed, int) or seed < 0 or not isinstance(epoch, int) or epoch < 0:
        return f"seed and epoch must be integers of at least 0. Received: {seed!r}, {epoch!r}"
    return ""
