"""Any picklable Python object, over the array collectives.

The pickled bytes travel with their length ahead of them, and an object that cannot be
pickled is told to every rank instead, so that nobody waits.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import numpy as np

from hvdp._core import submit, wording
from hvdp._core.arrays import Array
from hvdp._core.runtime import runtime
from hvdp._core.submit import Options
from hvdp.errors import InvalidArgumentError

__all__ = ["allgather_object", "broadcast_object"]


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: int = 0
) -> Any:
    """Rank `root_rank`'s object on every member; see `hvdp.broadcast_object`."""
    engine = runtime.require("broadcast_object")
    is_root = engine.rank == root_rank
    once = name is None
    name = name or engine.unnamed("broadcast_object", process_set)
    payload, fault = _pickled(obj) if is_root else (b"", b"")
    head = np.array([len(payload), len(fault)], np.int64)
    head = _broadcast(head, root_rank, Options(f"{name}.length", process_set, once=once))
    body = np.frombuffer(bytearray(payload + fault), np.uint8) if is_root else np.empty(head.sum(), np.uint8)
    raw = _broadcast(body, root_rank, Options(f"{name}.pickle", process_set, once=once)).tobytes()
    if head[1]:
        raise InvalidArgumentError(raw.decode())
    return obj if is_root else pickle.loads(raw)


def allgather_object(obj: Any, name: str | None = None, process_set: int = 0) -> list[Any]:
    """Every member's object, in rank order; see `hvdp.allgather_object`."""
    engine = runtime.require("allgather_object")
    once = name is None
    name = name or engine.unnamed("allgather_object", process_set)
    payload, fault = _pickled(obj)
    heads = _allgather(
        np.array([[len(payload), len(fault)]]), Options(f"{name}.length", process_set, once=once)
    )
    body = np.frombuffer(payload + fault, np.uint8)
    stream = io.BytesIO(_allgather(body, Options(f"{name}.pickle", process_set, once=once)).tobytes())
    parts = [(stream.read(length), stream.read(fault_length)) for length, fault_length in heads.tolist()]
    faults = [text.decode() for _, text in parts if text]
    if faults:
        raise InvalidArgumentError("; ".join(faults))
    return [pickle.loads(raw) for raw, _ in parts]


def _broadcast(data: Array, root_rank: int, options: Options) -> Array:
    result: Array = submit.at_once(submit.broadcast(data, root_rank, options))
    return result


def _allgather(data: Array, options: Options) -> Array:
    result: Array = submit.at_once(submit.allgather(data, options))
    return result


def _pickled(obj: Any) -> tuple[bytes, bytes]:
    """The pickled object, or the reason why there is none."""
    try:
        return cloudpickle.dumps(obj), b""
    except Exception as error:  # noqa: BLE001 - __reduce__ may raise anything
        rank = runtime.require("pickle").rank
        kind, words = type(obj).__name__, wording.exception(error)
        return b"", f"the object of rank {rank} cannot be pickled: {kind}: {words}".encode()
