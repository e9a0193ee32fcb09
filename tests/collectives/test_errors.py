"""A wrong call raises the same error on every rank at once, and the next right call works."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvdp
import hvdp.torch
from hvdp._core import submit
from hvdp._core.ops import Sum
from hvdp.errors import InvalidArgumentError, MismatchError
from hvdp.testing import World, worlds

AT_ONCE = 10.0  # seconds; the stall report would come after 60, a lost rank's after the job's end
Call = Callable[[bool], Any]


class _Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError


class _Unpicklable:
    def __init__(self, fault: Exception | None = None) -> None:
        self._fault = fault or RuntimeError("not for others")

    def __reduce__(self) -> Any:
        raise self._fault


class _Refuses:
    """A compressor that fails on one rank."""

    def __init__(self, odd: bool) -> None:
        self._odd = odd

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        if self._odd:
            raise RuntimeError("too small")
        return tensor, None

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        return tensor


def _compressed(hvd: Any, tensor: Any) -> Any:
    return hvd.reducescatter(tensor, name="x", compression=hvd.Compression.fp16)


def _on_device(name: str, device: str) -> Any:
    options = submit.Options(name, device=device)
    return submit.at_once(submit.allreduce(np.zeros(2), Sum, 1.0, 1.0, options))


def _disagreements(hvd: Any) -> dict[str, tuple[Call, str]]:
    """Calls that differ on the last rank, which gets True; and what must be said of the values."""
    zeros = (lambda *shape, **kw: np.zeros(shape, **kw)) if hvd is hvdp else torch.zeros
    narrow = np.float32 if hvd is hvdp else torch.float32
    wide = np.float64 if hvd is hvdp else torch.float64
    cases: dict[str, tuple[Call, str]] = {
        "shape": (lambda odd: hvd.allreduce(zeros(2 + odd), name="shape"), "shape is (2,) {} (3,) {}"),
        "dtype": (
            lambda odd: hvd.allreduce_(zeros(2, dtype=narrow if odd else wide), name="dtype"),
            "dtype is float64 {} float32 {}",
        ),
        "op": (
            lambda odd: hvd.reducescatter(zeros(2), op=hvd.Max if odd else hvd.Sum, name="op"),
            "op is Sum {} Max {}",
        ),
        "before": (
            lambda odd: hvd.allreduce(zeros(2), prescale_factor=1.0 + odd, name="before"),
            "prescale_factor is 1.0 {} 2.0 {}",
        ),
        "after": (
            lambda odd: hvd.allreduce(zeros(2), postscale_factor=1.0 + odd, name="after"),
            "postscale_factor is 1.0 {} 2.0 {}",
        ),
        "root": (lambda odd: hvd.broadcast(zeros(2), int(odd), name="root"), "root_rank is 0 {} 1 {}"),
        "device": (lambda odd: _on_device("device", "cuda" if odd else "cpu"), "device is cpu {} cuda {}"),
        "kind": (
            lambda odd: (
                hvd.broadcast(zeros(2), 0, "kind") if odd else hvd.alltoall(zeros(hvd.size()), name="kind")
            ),
            "kind is alltoall {} broadcast {}",
        ),
        "columns": (lambda odd: hvd.allgather(zeros(1, 2 + odd), name="columns"), "shape is (2,) {} (3,) {}"),
        "group": (
            lambda odd: hvd.grouped_allreduce([zeros(2), zeros(3 + odd)], name="group"),
            "allreduce 'group.1': shape is (3,) {} (4,) {}",
        ),
        "more": (
            lambda odd: hvd.grouped_allreduce([zeros(2)] * (2 + 2 * odd), name="more"),
            "allreduce 'more.0': group_size is 2 {} 4 {}",
        ),
        "allgather.": (
            lambda odd: hvd.grouped_allgather([zeros(2)] * (3 - 2 * odd)),
            "group_size is 3 {} 1 {}",
        ),
        "number of dimensions": (
            lambda odd: hvd.alltoall(zeros(hvd.size(), *[1] * odd), name="number of dimensions"),
            "shape is () {} (1,) {}",
        ),
    }
    if hvd is hvdp:
        return cases
    return cases | {
        "sparse": (
            lambda odd: hvd.sparse_allreduce_async(torch.eye(3 + odd).to_sparse(), "sparse", hvd.Sum).wait(),
            "allgather 'sparse': shape is (3, 3) {} (4, 4) {}",
        ),
        "rows": (
            lambda odd: hvd.sparse_allreduce_async(torch.eye(3).to_sparse(2 - odd), "rows", hvd.Sum).wait(),
            "shape is (2,) {} (1,) {}",
        ),
    }


def _faults(hvd: Any) -> dict[str, tuple[Call, str]]:
    """Calls that are wrong on the last rank alone, and what must be said."""
    lib = np if hvd is hvdp else torch
    zeros = lib.zeros
    size = hvd.size()
    rows = zeros(2 * size)
    even = [2] * size
    cases: dict[str, tuple[Call, str]] = {
        "root": (lambda odd: hvd.broadcast(rows, size if odd else 0, name="x"), f"Received: {size}"),
        "root below": (lambda odd: hvd.broadcast_(rows, -1 if odd else 0, name="x"), "Received: -1"),
        "root's type": (lambda odd: hvd.broadcast(rows, "0" if odd else 0, name="x"), "Received: '0'"),
        "no root": (lambda odd: hvd.broadcast(rows, object() if odd else 0, name="x"), "Received: <object"),
        "sum": (lambda odd: hvd.alltoall(rows, [3 if odd else 2, *even[1:]], name="x"), "add up to"),
        "negative": (
            lambda odd: hvd.alltoall(rows, [-1, 5, *even[2:]] if odd else even, name="x"),
            "negative",
        ),
        "length": (
            lambda odd: hvd.alltoall(rows, [2 * size] if odd else even, name="x"),
            "one entry for each",
        ),
        "type": (lambda odd: hvd.alltoall(rows, [2.0] * size if odd else even, name="x"), "float64"),
        "ragged": (
            lambda odd: hvd.alltoall(rows, [[1], [2, 3]] if odd else even, name="x"),
            "list of integers",
        ),
        "text": (lambda odd: hvd.alltoall(rows, "even" if odd else even, name="x"), "integers"),
        "none": (lambda odd: hvd.alltoall(zeros(size + odd), name="x"), "must divide by"),
        "expanded": (
            lambda odd: hvd.allreduce_(lib.broadcast_to(zeros(1), (4,)) if odd else zeros(4), name="x"),
            "a read-only array" if hvd is hvdp else "an expanded tensor",
        ),
        "scalar": (lambda odd: hvd.reducescatter(zeros(() if odd else 3), name="x"), "a scalar"),
        "op": (lambda odd: hvd.allreduce(rows, op=17 if odd else hvd.Sum, name="x"), "Received: 17"),
        "op's type": (lambda odd: hvd.allreduce(rows, op="Sum" if odd else 1, name="x"), "Received: 'Sum'"),
        "both": (lambda odd: hvd.allreduce(rows, average=True, op=1 if odd else None, name="x"), "not both"),
        "factor": (lambda odd: hvd.allreduce(rows, prescale_factor="a" if odd else 1.0, name="x"), "'a'"),
        "adasum": (
            lambda odd: hvd.reducescatter(rows, op=hvd.Adasum if odd else hvd.Sum, name="x"),
            "Adasum",
        ),
        "nothing": (lambda odd: hvd.allreduce(None if odd else rows, name="x"), ""),
        "a class": (lambda odd: hvd.allgather(dict if odd else rows, name="x"), ""),
        "in a group": (lambda odd: hvd.grouped_allreduce([rows, None if odd else rows], name="x"), ""),
        "no name": (lambda odd: hvd.allreduce(None if odd else rows), ""),
        "object": (lambda odd: hvd.allgather_object(_Unpicklable() if odd else 1), "not for others"),
        "sent": (lambda odd: hvd.broadcast_object(_Unpicklable(), root_rank=size - 1), "not for others"),
        "words": (
            lambda odd: hvd.allgather_object(_Unpicklable(OSError("no \udcff")) if odd else 1),
            "no \\udcff",
        ),
        "no words": (
            lambda odd: hvd.broadcast_object(_Unpicklable(_Wordless()), root_rank=size - 1),
            "_Wordless: (it has no text)",
        ),
        "no number": (lambda odd: hvd.allreduce(rows, postscale_factor=math.nan, name="x"), "factor nan"),
        "object's root": (lambda odd: hvd.broadcast_object(1, root_rank="a" if odd else 0), "Received: 'a'"),
        "compressed": (lambda odd: _compressed(hvd, [[1], [1, 2]] if odd else rows), "Error: "),
        "own compressor": (
            lambda odd: hvd.grouped_allreduce([rows, rows], name="x", compression=_Refuses(odd)),
            "RuntimeError: too small",
        ),
        "set": (lambda odd: hvd.add_process_set([0, 7] if odd else [0, 1]), "[0, 7]"),
    }
    if hvd is hvdp:
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        return cases | {
            "dtype": (lambda odd: hvd.allreduce(np.array(["a"] if odd else [1.0]), name="x"), "<U1"),
            "swapped": (lambda odd: hvd.allgather(np.zeros(2, ">f4" if odd else "f4"), name="x"), ">f4"),
            "long": (lambda odd: hvd.alltoall(np.zeros(size, np.longdouble), name="x"), "128"),
            "objects": (lambda odd: hvd.broadcast(np.array([{}]), 0, name="x"), "object"),
            "frozen": (lambda odd: hvd.allreduce_(frozen if odd else np.zeros(3), name="x"), "read-only"),
            "sent": (lambda odd: hvd.broadcast_(frozen if odd else np.zeros(3), 0, name="x"), "read-only"),
            "all sent": (lambda _: hvd.broadcast_(frozen, 0, name="x"), "read-only"),
            "one of two": (
                lambda odd: hvd.grouped_allreduce_([rows, frozen if odd else np.zeros(3)], name="x"),
                "read-only",
            ),
            "all of two": (lambda _: hvd.grouped_allreduce_([rows, frozen], name="x"), "read-only"),
            "a list": (lambda odd: hvd.broadcast_([1.0] if odd else np.zeros(1), 0, name="x"), "list"),
            "uneven": (
                lambda odd: hvd.allreduce([[1], [1, 2]] if odd else np.zeros(2), name="x"),
                "ValueError",
            ),
        }
    sparse = torch.eye(3).to_sparse()
    return cases | {
        "an array": (lambda odd: hvd.allreduce(np.zeros(2) if odd else torch.zeros(2), name="x"), "ndarray"),
        "sparse": (lambda odd: hvd.allreduce(sparse if odd else torch.zeros(3, 3), name="x"), "sparse_coo"),
        "no memory": (
            lambda odd: hvd.allreduce(torch.zeros(2, device="meta" if odd else "cpu"), name="x"),
            "meta",
        ),
        "eight bits": (
            lambda odd: hvd.allreduce(torch.zeros(2, dtype=torch.float8_e5m2), name="x"),
            "Float8",
        ),
        "half complex": (lambda odd: hvd.allgather(torch.zeros(2, dtype=torch.complex32), name="x"), ""),
        "dense": (
            lambda odd: hvd.sparse_allreduce_async(torch.eye(3) if odd else sparse, "x", hvd.Sum).wait(),
            "takes a sparse COO tensor",
        ),
        "sparse op": (
            lambda odd: hvd.sparse_allreduce_async(sparse, "x", hvd.Max if odd else hvd.Sum).wait(),
            "op Max",
        ),
    }


def _meaningless(hvd: Any) -> dict[str, tuple[Call, str]]:
    """Calls that are equally wrong on all ranks."""
    ones = np.ones if hvd is hvdp else torch.ones
    lib = np if hvd is hvdp else torch
    boolean = bool if hvd is hvdp else torch.bool
    return {
        "bools": (
            lambda _: hvd.allreduce(ones(2, dtype=boolean), name="x"),
            "Average has no meaning for dtype bool",
        ),
        "complex": (
            lambda _: hvd.allreduce(ones(2, dtype=lib.complex64), op=hvd.Min, name="x"),
            "Min has no",
        ),
        "ints": (lambda _: hvd.allreduce(ones(2, dtype=lib.int32), op=hvd.Adasum, name="x"), "Adasum has no"),
        "rows": (lambda _: hvd.reducescatter(ones(2, dtype=boolean), name="x"), "Average has no meaning"),
        "scaled bools": (
            lambda _: hvd.allreduce(ones(2, dtype=boolean), op=hvd.Sum, prescale_factor=2.0, name="x"),
            "scale factors have no meaning for dtype bool; cast the tensor first. "
            "Received: prescale_factor 2.0, postscale_factor 1.0",
        ),
        "scaled rows": (
            lambda _: hvd.reducescatter(ones(2, dtype=boolean), op=hvd.Max, postscale_factor=0.5, name="x"),
            "Received: prescale_factor 1.0, postscale_factor 0.5",
        ),
    }


def _raises(kind: type[Exception], call: Call, odd: bool) -> str:
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        call(odd)
    assert type(caught.value) is kind
    assert time.monotonic() - began < AT_ONCE
    return str(caught.value)


def _every_error() -> dict[str, tuple[str, str]]:
    """What was said in each case, and what should have been."""
    hvdp.init()
    return _errors_of(hvdp) | {f"{label} in torch": said for label, said in _errors_of(hvdp.torch).items()}


def _errors_of(hvd: Any) -> dict[str, tuple[str, str]]:
    odd, size = hvd.rank() == hvd.size() - 1, hvd.size()
    ones = np.ones if hvd is hvdp else torch.ones
    tables = (
        (MismatchError, _disagreements(hvd)),
        (InvalidArgumentError, _faults(hvd)),
        (InvalidArgumentError, _meaningless(hvd)),
    )
    said = {}
    for kind, table in tables:
        for what, (call, wanted) in table.items():
            label = f"{kind.__name__} {what}"
            said[label] = (_raises(kind, call, odd), wanted)
            # A correct call under the same name, and one without.
            for name in ("x", what, None):
                assert hvd.allreduce(ones(3), op=hvd.Sum, name=name).tolist() == [size] * 3, label
    return said


@pytest.mark.parametrize("world", worlds(shm=(2, 3), mpi=(2,)), ids=str)
def test_errors_come_on_all_ranks_alike_and_tell_who_and_what(world: World) -> None:
    first, *others = world.run(_every_error, timeout=100)
    last = world.size - 1
    rest = "rank 0" if last == 1 else "ranks 0, 1"
    for label, (text, wanted) in first.items():
        for other in others:
            assert other[label][0] == text, label
        if label.startswith("Mismatch"):
            wanted = wanted.format(f"on {rest},", f"on rank {last}")
            assert f"'{label.split()[1]}" in text, "the tensor's name is missing"
        else:
            everybody = "ranks 0" in text
            assert everybody or f"rank {last}" in text, f"{label}: {text}"
            assert re.search(r"\(in \w+ '[\w.]+'\)$", text) or "object" in text, f"{label}: {text}"
        assert wanted in text, f"{label}: {text}"
