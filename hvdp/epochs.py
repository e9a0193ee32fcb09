"""Are all ranks in the same epoch of the data that they share?

Shards count their epochs on each rank by itself: a rank that looks at a batch alone is one epoch
ahead from then on, and takes elements that others take too.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np

from hvdp._core import submit
from hvdp._core.arrays import Array
from hvdp._core.handles import Handle
from hvdp._core.runtime import runtime
from hvdp._core.submit import Options
from hvdp.errors import MismatchError

__all__ = ["Counted", "check_epochs", "epochs_check", "watch"]


class Counted(Protocol):
    """A shard that is of another epoch each time it is iterated.

    Attributes:
        epoch: the one that the next iteration is of.
    """

    epoch: int


# By process set: those still in use on this rank, under numbers that are the same on all.
_watched: dict[tuple[int, int], WeakValueDictionary[int, Counted]] = {}


def watch(shard: Counted, process_set: int) -> None:
    """Let `check_epochs` compare the shard with those that the other members make at the same time."""
    shards = _watched.setdefault((runtime.starts, process_set), WeakValueDictionary())
    shards[runtime.serial(f"shard.{process_set}")] = shard


def check_epochs(what: str, process_set: int) -> None:
    """Raise if ranks have iterated a shard of this process set differently often; collective.

    Costs nothing where none was ever made.

    Raises:
        MismatchError: on every rank, with the epochs of all.
    """
    handle = epochs_check(what, process_set)
    if handle is not None:
        handle.wait()


def epochs_check(what: str, process_set: int) -> Handle | None:
    """Begin `check_epochs`, whose errors the handle's `wait` raises; None where there is nothing to check."""
    shards = _watched.get((runtime.starts, process_set))
    if shards is None:
        return None
    rank = runtime.require(what).rank
    # The first row for who has no shard any more.
    rows = [(rank, -1, 0), *((rank, number, shard.epoch) for number, shard in list(shards.items()))]
    options = Options(f"{what}.epochs", process_set)
    return submit.alone(submit.allgather(np.array(rows, np.int64), options)).then(_compare)


def _compare(rows: Array) -> None:
    everybodys: dict[int, dict[int, int]] = {}
    for rank, number, epoch in rows.tolist():
        everybodys.setdefault(rank, {})[number] = epoch
    # When a shard is collected as garbage is each rank's own affair.
    for number in sorted(set.intersection(*(set(epochs) for epochs in everybodys.values()))):
        epochs = {rank: theirs[number] for rank, theirs in everybodys.items()}
        if len(set(epochs.values())) > 1:
            told = ", ".join(f"rank {rank} in {epoch}" for rank, epoch in epochs.items())
            raise MismatchError(
                f"the ranks are in different epochs of shard {number}, and share elements: {told}. "
                "All ranks must iterate a shard equally often, also to look at one batch; "
                "for one rank alone make another, with its process_set."
            )
