"""Process sets: groups of ranks whose members communicate among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hvdp._core.objects import allgather_object
from hvdp._core.operations import AddProcessSet, RemoveProcessSet
from hvdp._core.runtime import runtime
from hvdp.errors import InvalidArgumentError

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Some ranks of the job; usable once given to `init` or `add_process_set` on all ranks.

    Args:
        ranks_or_comm: global ranks in any order, or an mpi4py communicator, whose ranks they then are.

    Attributes:
        ranks: ascending; for the global process set all ranks, once `init` has been called.
        process_set_id: its number, 0 for the global one; None until added, and after removal or shutdown.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self._number: int | None = None
        self._start = 0
        self.mpi_comm: Any = None
        self._ranks: list[int] | None = None
        if isinstance(ranks_or_comm, Iterable):
            ranks = list(ranks_or_comm)
            if any(not isinstance(rank, int | np.integer) or isinstance(rank, bool) for rank in ranks):
                raise InvalidArgumentError(f"a process set is made of rank numbers. Received: {ranks!r}")
            self._ranks = sorted(map(int, ranks))
        elif hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            self._ranks = _world_ranks(ranks_or_comm)
        else:
            raise InvalidArgumentError(
                "a process set is made of a list of ranks or an mpi4py communicator. "
                f"Received: {type(ranks_or_comm).__name__}"
            )

    @property
    def process_set_id(self) -> int | None:
        return self._number if self._number == 0 or self._start == runtime.starts else None

    @process_set_id.setter
    def process_set_id(self, number: int | None) -> None:
        self._number, self._start = number, runtime.starts

    @property
    def ranks(self) -> list[int] | None:
        if self.process_set_id == 0:
            return None if runtime.engine is None else list(runtime.engine.group(0).ranks)
        return self._ranks

    def included(self) -> bool:
        """Whether this process is a member."""
        return runtime.require("included").rank in self._known_ranks()

    def size(self) -> int:
        """The number of members."""
        return len(self._known_ranks())

    def rank(self) -> int:
        """This process's number among the members.

        Raises:
            InvalidArgumentError: it is not a member.
        """
        ranks, own = self._known_ranks(), runtime.require("rank").rank
        if own not in ranks:
            raise InvalidArgumentError(f"rank {own} is not a member of {self}")
        return ranks.index(own)

    def number(self) -> int:
        """Its id, for a collective.

        Raises:
            InvalidArgumentError: it has not been added, or was removed.
        """
        if self.process_set_id is None:
            raise InvalidArgumentError(
                f"{self} is not known: before using it call add_process_set on every rank, or give it to init"
            )
        return self.process_set_id

    def invalidate(self) -> None:
        """Forget everything; done by `remove_process_set`."""
        self.process_set_id, self._ranks, self.mpi_comm = None, None, None

    def _known_ranks(self) -> list[int]:
        self.number()
        return self.ranks or []

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a process set usable; every rank of the job must call it, members or not.

    Equal ranks give the same set again. Made of a communicator, each rank's set may be
    another one (as after `comm.Split`): all of them are added.

    Returns:
        The set, made from the list of ranks if one was given.

    Raises:
        InvalidArgumentError: empty, duplicate or unknown ranks; on every rank.
        MismatchError: the ranks named different sets.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    engine = runtime.require("add_process_set")
    wanted = tuple(made.ranks or ())
    if made.mpi_comm is None:
        made.process_set_id = _add(wanted)
        return made
    numbers = {ranks: _add(ranks) for ranks in sorted(set(allgather_object(wanted)))}
    made.process_set_id = numbers[wanted]
    engine.group(made.process_set_id)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Undo `add_process_set`; every rank must call it. The global process set stays: False.

    Other objects for the same ranks are then as unusable as this one, which forgets its ranks.

    Raises:
        InvalidArgumentError: the set is not known, or has operations in flight.
    """
    number = process_set.number()
    if number == 0:
        return False
    engine = runtime.require("remove_process_set")
    engine.run(
        RemoveProcessSet(f"remove_process_set.{runtime.serial('process_sets')}", number, engine.executor)
    )
    process_set.invalidate()
    return True


def _add(ranks: tuple[int, ...]) -> int:
    engine = runtime.require("add_process_set")
    fault = ""
    if not ranks or len(set(ranks)) != len(ranks) or ranks[0] < 0 or ranks[-1] >= engine.topology.size:
        fault = (
            f"a process set needs different ranks between 0 and {engine.topology.size - 1}. "
            f"Received: {list(ranks)}"
        )
    name = f"add_process_set.{runtime.serial('process_sets')}"
    number = engine.run(AddProcessSet(name, ranks, engine.executor, fault))
    assert isinstance(number, int)
    return number


def _world_ranks(comm: Any) -> list[int]:
    from mpi4py import MPI

    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    return sorted(MPI.Group.Translate_ranks(group, list(range(group.Get_size())), world))
