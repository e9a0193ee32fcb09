"""From arguments to submitted operations: what every adapter's collectives share.

Data is always a C-contiguous NumPy array; `process_set` is a number that `Engine.group` knows.
Operations made here are submitted together by `together`, alone by `alone`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdp._core.arrays import Array, dtype_label
from hvdp._core.engine import Engine
from hvdp._core.handles import GroupHandle, Handle
from hvdp._core.operation import Operation
from hvdp._core.operations import (
    Allgather,
    Allreduce,
    Alltoall,
    Barrier,
    Broadcast,
    Fault,
    Join,
    Reducescatter,
)
from hvdp._core.operations.alltoall import checked_splits
from hvdp._core.operations.checks import root_fault
from hvdp._core.ops import Kind, ReduceOp, Signature
from hvdp._core.runtime import runtime

__all__ = [
    "Options",
    "allgather",
    "allreduce",
    "alltoall",
    "alone",
    "at_once",
    "barrier",
    "broadcast",
    "faulty",
    "grouped",
    "join",
    "reducescatter",
]


class Options(NamedTuple):
    """What collective calls have in common.

    Attributes:
        name: None makes one up, by the order of such calls.
        once: the name will not come again, so it need not be remembered.
        device: where the caller's tensor lives; compared between the ranks.
        group_size: tensors in a grouped call.
    """

    name: str | None = None
    process_set: int = 0
    device: str = "cpu"
    once: bool = False
    group_size: int = 1

    def numbered(self, index: int) -> Options:
        """For one tensor of a group."""
        return self._replace(name=f"{self.name}.{index}") if self.name is not None else self

    def named(self, kind: Kind) -> Options:
        """With a name, where there is none one by the order of such calls."""
        if self.name is not None:
            return self
        return self._replace(name=_engine(kind).unnamed(kind.value, self.process_set), once=True)


def allreduce(
    data: Array, op: ReduceOp, prescale_factor: float, postscale_factor: float, options: Options
) -> Operation:
    """In place on `data`; the result is `data` as one dimension."""
    return Allreduce(
        _signature(
            Kind.ALLREDUCE,
            data,
            options,
            op=op.name,
            prescale_factor=float(prescale_factor),
            postscale_factor=float(postscale_factor),
        ),
        data,
    )


def broadcast(data: Array, root_rank: int, options: Options) -> Operation:
    """In place on `data`, which is the result."""
    members = _engine(Kind.BROADCAST).group(options.process_set).ranks
    fault = root_fault(root_rank, members)
    signature = _signature(Kind.BROADCAST, data, options, root_rank=-1 if fault else int(root_rank))
    return Broadcast(signature, data, members, fault)


def allgather(data: Array, options: Options) -> Operation:
    """The result is a new array; a scalar counts as an array of one."""
    data = data.reshape(1) if data.ndim == 0 else data
    return Allgather(_signature(Kind.ALLGATHER, data, options, shape=data.shape[1:]), data)


def alltoall(data: Array, splits: Any, options: Options) -> Operation:
    """The result is (a new array, rows received from each member)."""
    data = data.reshape(1) if data.ndim == 0 else data
    signature = _signature(Kind.ALLTOALL, data, options, shape=data.shape[1:])
    members = _engine(signature.kind).group(options.process_set).size
    counts, fault = checked_splits(splits, data.shape[0], members)
    return Alltoall(signature, data, counts, fault)


def reducescatter(
    data: Array, op: ReduceOp, prescale_factor: float, postscale_factor: float, options: Options
) -> Operation:
    """The result is a new array with this member's rows."""
    return Reducescatter(
        _signature(
            Kind.REDUCESCATTER,
            data,
            options,
            op=op.name,
            prescale_factor=float(prescale_factor),
            postscale_factor=float(postscale_factor),
        ),
        data,
    )


def barrier(process_set: int = 0) -> None:
    """Return on no member before all have called."""
    engine = _engine(Kind.BARRIER)
    engine.group(process_set)
    engine.run(Barrier(engine.unnamed("barrier", process_set), process_set))


def join() -> int:
    """See `hvdp.join`."""
    engine = _engine(Kind.JOIN)
    rank = engine.run(Join())
    assert isinstance(rank, int)
    engine.rename()
    runtime.joined()
    return rank


def faulty(kind: Kind, options: Options, fault: str) -> Operation:
    """Takes the place of a call whose arguments are wrong here, so that every member raises."""
    return Fault(_signature(kind, np.empty(0, np.uint8), options), fault)


def alone(operation: Operation) -> Handle:
    """Submit one operation."""
    return _engine(operation.signature.kind).submit(operation)[0]


def at_once(operation: Operation) -> Any:
    """Submit one operation and wait for its result."""
    return _engine(operation.signature.kind).run(operation)


def grouped(operations: Sequence[Operation]) -> GroupHandle:
    """Submit several operations at once; the result is the list of theirs."""
    if not operations:
        return GroupHandle([])
    return GroupHandle(_engine(operations[0].signature.kind).submit(*operations))


def _engine(kind: Kind) -> Engine:
    return runtime.engine or runtime.require(kind.value)


def _signature(kind: Kind, data: Array, options: Options, **fields: Any) -> Signature:
    _engine(kind).group(options.process_set)
    name, process_set, device, once, group_size = options.named(kind)
    fields.setdefault("shape", data.shape)
    return Signature(
        kind,
        str(name),
        process_set,
        dtype_label(data.dtype),
        device=device,
        once=once,
        group_size=group_size,
        **fields,
    )
