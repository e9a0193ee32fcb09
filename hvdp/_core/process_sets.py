"""Subsets of ranks that communicate among themselves."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Group"]


@dataclass(frozen=True)
class Group:
    """The members of one process set as a transport sees them.

    Attributes:
        number: the process set's id; 0 is all ranks.
        ranks: global ranks, ascending.
        index: this process's position in `ranks`.
    """

    number: int
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)
