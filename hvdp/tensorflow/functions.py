"""Variables and objects from one rank, and the job's numbers as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdp import collectives as generic
from hvdp._core.agreement import check_same_variables
from hvdp._core.handles import GroupHandle
from hvdp._core.runtime import runtime
from hvdp.basics import local_rank, local_size, rank
from hvdp.process_sets import ProcessSet, global_process_set
from hvdp.tensorflow._graph import OPERATION, as_written, in_order
from hvdp.tensorflow._tensors import as_tensor, collectives

__all__ = [
    "allgather_object",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]


@as_written
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Assign rank `root_rank`'s values to variables, matched by their order; they are returned.

    TensorFlow's or Keras's variables, eager or in a graph. Ranks make such calls in one order.

    Raises:
        MismatchError: the ranks' numbers of variables, shapes or dtypes differ; on every rank.
        InvalidArgumentError: something is no variable on any rank; on every rank.
    """
    raw = [getattr(variable, "value", variable) for variable in variables]
    raw = [given if callable(value) else value for given, value in zip(variables, raw, strict=True)]
    tensors = [as_tensor(variable) for variable in raw]
    faults = [f"variable {i}: {t}" for i, t in enumerate(tensors) if isinstance(t, Exception)]

    def values(*tensors: Any) -> list[Any]:
        described = ((tensor.shape, tensor.dtype.name) for tensor in tensors)
        check_same_variables(described, "; ".join(faults), process_set.number())
        handles = [
            collectives.broadcast_async(tensor, root_rank, f"{name}.{index}" if name else None, process_set)
            for index, tensor in enumerate(tensors)
        ]
        received: list[Any] = GroupHandle(handles).wait()
        return received

    if faults:
        values()
    if tf.executing_eagerly():
        results = values(*tensors)
    else:
        dtypes = [tensor.dtype for tensor in tensors]
        results = in_order(lambda: tf.py_function(values, tensors, dtypes, name=OPERATION))
    for variable, tensor, result in zip(raw, tensors, results, strict=True):
        variable.assign(tf.ensure_shape(result, tensor.shape))
    return list(variables)


@as_written
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> list[Any]:
    """As `broadcast_`; `inplace` is accepted as Horovod accepts it."""
    return broadcast_(variables, root_rank, None, process_set)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rank `root_rank`'s object on every member; `session` is accepted as Horovod accepts it."""
    return generic.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """`broadcast_object` as a function of the object alone."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Every member's object, in rank order; `session` is accepted as Horovod accepts it."""
    return generic.allgather_object(obj, name, process_set)


@as_written
def rank_op(name: str | None = None) -> Any:
    """`rank()` as an int32 tensor, asked for when it is computed: a graph may outlive a job."""
    return _number(rank, name)


@as_written
def local_rank_op(name: str | None = None) -> Any:
    """`local_rank()` as `rank_op`."""
    return _number(local_rank, name)


@as_written
def local_size_op(name: str | None = None) -> Any:
    """`local_size()` as `rank_op`."""
    return _number(local_size, name)


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of members of a process set as `rank_op`."""
    return _number(lambda: runtime.require("size_op").group(process_set_id).size, name)


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 if this rank is a member of a process set, else 0, as `rank_op`."""
    return _number(
        lambda: int(process_set_id in runtime.require("process_set_included_op").executor.groups), name
    )


def _number(ask: Callable[[], int], name: str | None) -> Any:
    if tf.executing_eagerly():
        return tf.constant(ask(), tf.int32)
    return tf.ensure_shape(tf.py_function(ask, [], tf.int32, name=name or OPERATION), [])
