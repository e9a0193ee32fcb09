"""Any picklable Python object, over the array collectives.

Each call is one collective: the pickled bytes travel with their length ahead of them, and an
object that cannot be pickled is told to every rank instead, so that nobody waits.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import numpy as np

from hvdp._core import submit
from hvdp._core.runtime import runtime
from hvdp.errors import InvalidArgumentError

__all__ = ["allgather_object", "broadcast_object"]


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Rank `root_rank`'s object on every rank; the root gets its own object back.

    Objects are pickled by value where needed (lambdas, functions of `__main__`).

    Raises:
        InvalidArgumentError: on every rank, if the object cannot be pickled.
    """
    engine = runtime.require("broadcast_object")
    is_root = engine.rank == root_rank
    name = name or engine.unnamed("broadcast_object", 0)
    payload, fault = _pickled(obj) if is_root else (b"", "")
    head = np.array([len(payload), len(fault)], np.int64)
    head = submit.broadcast(head, root_rank, f"{name}.length").wait()
    body = np.frombuffer(payload + fault.encode(), np.uint8) if is_root else np.empty(head.sum(), np.uint8)
    raw = submit.broadcast(body, root_rank, f"{name}.pickle").wait().tobytes()
    if head[1]:
        raise InvalidArgumentError(raw.decode())
    return obj if is_root else pickle.loads(raw)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's object, in rank order, on every rank.

    Raises:
        InvalidArgumentError: on every rank, if any rank's object cannot be pickled.
    """
    engine = runtime.require("allgather_object")
    name = name or engine.unnamed("allgather_object", 0)
    payload, fault = _pickled(obj)
    head = np.array([[len(payload), len(fault)]], np.int64)
    heads = submit.allgather(head, f"{name}.length").wait()
    body = np.frombuffer(payload + fault.encode(), np.uint8)
    stream = io.BytesIO(submit.allgather(body, f"{name}.pickle").wait().tobytes())
    objects, faults = [], []
    for length, fault_length in heads.tolist():
        if length:
            objects.append(pickle.loads(stream.read(length)))
        faults.append(stream.read(fault_length).decode())
    if any(faults):
        raise InvalidArgumentError("; ".join(fault for fault in faults if fault))
    return objects


def _pickled(obj: Any) -> tuple[bytes, str]:
    """The pickled object, or the reason why there is none."""
    try:
        return cloudpickle.dumps(obj), ""
    except Exception as error:  # noqa: BLE001 - __reduce__ may raise anything
        rank = runtime.require("pickle").rank
        return b"", f"the object of rank {rank} cannot be pickled: {type(obj).__name__}: {error}"
