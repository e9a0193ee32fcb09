"""The collectives, one file each; all fill in `Operation`."""

from hvdp._core.operation import Operation
from hvdp._core.operations.allgather import Allgather
from hvdp._core.operations.allreduce import Allreduce
from hvdp._core.operations.alltoall import Alltoall
from hvdp._core.operations.barrier import Barrier, Join
from hvdp._core.operations.broadcast import Broadcast
from hvdp._core.operations.buckets import Allocate, ReduceBucket
from hvdp._core.operations.fault import Fault
from hvdp._core.operations.process_sets import AddProcessSet, RemoveProcessSet
from hvdp._core.operations.reducescatter import Reducescatter

__all__ = [
    "OPERATIONS",
    "AddProcessSet",
    "Allgather",
    "Allocate",
    "Allreduce",
    "Alltoall",
    "Barrier",
    "Broadcast",
    "Fault",
    "Join",
    "ReduceBucket",
    "Reducescatter",
    "RemoveProcessSet",
]

OPERATIONS: dict[str, type[Operation]] = {
    operation.kind: operation
    for operation in (
        AddProcessSet,
        Allgather,
        Allocate,
        Allreduce,
        Alltoall,
        Barrier,
        Broadcast,
        Join,
        ReduceBucket,
        Reducescatter,
        RemoveProcessSet,
    )
}
