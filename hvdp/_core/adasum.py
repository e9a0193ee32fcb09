"""Adasum: adding gradients so that what they share is not counted twice.

Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924.
Two gradients a and b become

    (1 - a.b / (2 |a|^2)) a  +  (1 - a.b / (2 |b|^2)) b,

their sum where they are orthogonal and their mean where they are equal. More are combined
in a binary tree: neighbours first, then neighbouring pairs, and so on. With a number of
members that is no power of two, the one left over on a level goes up unchanged.
"""

from __future__ import annotations

import numpy as np

from hvdp._core.arrays import Array, as_bytes
from hvdp._core.ops import Reduction, Sum
from hvdp._core.process_sets import Group
from hvdp.transports.base import Transport

__all__ = ["adasum"]


def adasum(transport: Transport, group: Group, data: Array, reduction: Reduction) -> None:
    """Combine the members' `data` (1-D floats) in place.

    Every member combines its shard of all members' vectors; the scalar products are summed
    over the members. Computed in float32 at least, products in float64; rounded once.
    """
    size = group.size
    wide = np.promote_types(data.dtype, np.float32) if data.dtype.itemsize > 2 else np.dtype(np.float32)
    step = -(-data.size // size)
    counts = [max(0, min(step, data.size - index * step)) for index in range(size)]
    nbytes = [count * data.itemsize for count in counts]
    mine = counts[group.index]
    gathered = np.empty((size, mine), data.dtype)
    transport.alltoall(group, as_bytes(data), as_bytes(gathered), [nbytes] * size)
    vectors = [row.astype(wide) * wide.type(reduction.prescale) for row in gathered]
    while len(vectors) > 1:
        pairs = list(zip(vectors[::2], vectors[1::2], strict=False))
        products = np.array([[_dot(a, b), _dot(a, a), _dot(b, b)] for a, b in pairs])
        transport.allreduce(group, products.reshape(-1), Reduction(Sum, size))
        combined = [_combine(a, b, *row) for (a, b), row in zip(pairs, products, strict=True)]
        vectors = combined + vectors[2 * len(pairs) :]
    shard = (vectors[0] * wide.type(reduction.postscale)).astype(data.dtype)
    transport.allgather(group, as_bytes(shard), as_bytes(data), nbytes)


def _dot(a: Array, b: Array) -> float:
    return float(np.dot(a.astype(np.float64), b.astype(np.float64)))


def _combine(a: Array, b: Array, ab: float, aa: float, bb: float) -> Array:
    weight_a = 1.0 - ab / (2.0 * aa) if aa > 0 else 1.0
    weight_b = 1.0 - ab / (2.0 * bb) if bb > 0 else 1.0
    result: Array = a * a.dtype.type(weight_a) + b * b.dtype.type(weight_b)
    return result
