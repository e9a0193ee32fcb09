"""Rows from every member to every member."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvdp._core.arrays import Array, as_bytes
from hvdp._core.operation import Operation, Terms
from hvdp._core.operations.checks import dtype_fault
from hvdp._core.ops import Kind, Signature
from hvdp._core.process_sets import Group
from hvdp.transports.base import Transport

__all__ = ["Alltoall", "checked_splits"]


class Alltoall(Operation):
    """Reads `data`, C-contiguous: the first splits[0] rows go to member 0, the next to member 1, ...

    The result is (rows received in member order, rows received from each member).
    """

    kind = Kind.ALLTOALL

    def __init__(self, signature: Signature, data: Array, splits: tuple[int, ...], fault: str = "") -> None:
        self.data = data
        super().__init__(signature, splits, dtype_fault(data.dtype) or fault)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def execute(self, transport: Transport, group: Group, terms: Terms) -> tuple[Array, list[int]]:
        rest = self.data.shape[1:]
        received = [splits[group.index] for splits in terms.extras]
        out = np.empty((sum(received), *rest), self.data.dtype)
        row_bytes = math.prod(rest) * out.itemsize
        counts = [[rows * row_bytes for rows in splits] for splits in terms.extras]
        if any(map(any, counts)):
            transport.alltoall(group, as_bytes(self.data), as_bytes(out), counts)
        return out, received


def checked_splits(splits: Any, rows: int, members: int) -> tuple[tuple[int, ...], str]:
    """One row count a member and "", or zeros and what is wrong.

    Args:
        splits: integers, one a member, that add up to `rows`; None cuts evenly.
    """
    nothing = (0,) * members
    if splits is None:
        if rows % members:
            return (
                nothing,
                f"without splits the rows must divide by {members} ranks. Received: {rows} rows",
            )
        return (rows // members,) * members, ""
    try:
        array = np.asarray(splits)
    except ValueError:
        return nothing, f"splits must be a list of integers. Received: {splits!r}"
    if array.dtype.kind not in "iu" and array.size:
        return nothing, f"splits must be integers. Received: {array.dtype}"
    counts = tuple(int(count) for count in array.reshape(-1))
    if array.ndim != 1 or len(counts) != members:
        return nothing, f"splits must have one entry for each of {members} ranks. Received: {splits!r}"
    if min(counts) < 0 or sum(counts) != rows:
        return nothing, f"splits must not be negative and add up to the {rows} rows. Received: {splits!r}"
    return counts, ""
