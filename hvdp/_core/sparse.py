"""Sparse gradients: every rank's entries are gathered, and added up where they are used."""

from __future__ import annotations

import numpy as np

from hvdp._core import counts, submit, wording
from hvdp._core.handles import Handle
from hvdp._core.ops import Average, ReduceOp, Sum
from hvdp._core.store import GradientStore
from hvdp._core.submit import Options
from hvdp.errors import MismatchError

__all__ = ["finish", "launch"]


def launch(
    store: GradientStore, index: int, dimensions: int, weight: float | None, window: int, options: Options
) -> Handle:
    """Start to gather one parameter's entries.

    Args:
        weight: how much this rank's entries count; None where all ranks' count alike.
        window: number of the window that they are of, equal on all ranks.
    """
    coordinates, values, exists = store.sparse_entries(index, dimensions)
    if weight is not None and values.dtype.itemsize == 2:
        # 16-bit floats times a number of samples overflow.
        values = values.astype(np.float32)
    if weight is None:
        weight = 1.0
    elif not weight:
        # Not by multiplication: the mean of no samples is not a number.
        coordinates, values, exists = coordinates[:0], values[:0], False
    else:
        values = values * values.dtype.type(weight)
    return submit.grouped(
        [
            submit.allgather(coordinates, options.numbered(0)),
            submit.allgather(values, options.numbered(1)),
            submit.allreduce(
                np.array([weight, exists, *counts.terms(window)]), Sum, 1.0, 1.0, options.numbered(2)
            ),
        ]
    )


def finish(store: GradientStore, index: int, op: ReduceOp, handle: Handle) -> None:
    """Wait for all ranks' entries and make them the gradient."""
    coordinates, values, (weights, existing, *windows) = handle.wait()
    if not counts.all_equal(*windows):
        raise MismatchError(wording.windows({}))
    if existing:
        if values.dtype.itemsize == 2:
            # Of 16-bit floats the sums are to be rounded, once.
            values = values.astype(np.float32)
        if op is Average:
            values /= values.dtype.type(weights or 1.0)
        store.deliver_sparse(index, coordinates, values)
    else:
        store.withdraw(index)
