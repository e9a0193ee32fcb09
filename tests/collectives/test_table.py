"""One table of collectives, ops, dtypes, shapes and layouts, on every transport and size."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterable
from typing import Any

import pytest

from hvdp.testing import World, worlds

from . import adasums, handles, movements, numbers, reductions, specials
from .kits import kits

TABLES: dict[str, Any] = {
    "reductions": reductions,
    "movements": movements,
    "numbers": numbers,
    "adasums": adasums,
    "specials": specials,
    "handles": handles,
}


def _run(rows: Iterable[Any], kit: Any, rank: int, size: int) -> tuple[list[str], list[str], list[Any]]:
    labels, failures, results = [], [], []
    for row in rows:
        labels.append(f"{kit.name} {row}")
        try:
            results.append(row.run(kit, rank, size))
        except Exception:  # noqa: BLE001 - all failing rows are reported, with their reason
            failures.append(f"{labels[-1]}\n{traceback.format_exc(limit=-2)}")
            results.append([])
    return labels, failures, results


def _whole_table(names: list[str]) -> tuple[list[str], list[str], list[Any]]:
    labels: list[str] = []
    failures: list[str] = []
    results: list[Any] = []
    for kit in kits():
        kit.hvd.init()
        for name in names:
            found = _run(TABLES[name].rows(), kit, kit.hvd.rank(), kit.hvd.size())
            for whole, part in zip((labels, failures, results), found, strict=True):
                whole += part
    return labels, failures, [hashlib.sha1(b"".join(result)).digest() for result in results]


@pytest.mark.timeout(240)  # of which a machine with enough cores needs a tenth
@pytest.mark.parametrize("world", worlds(shm=(1, 2, 3, 4), mpi=(1, 2, 3, 4)), ids=str)
def test_every_row(world: World) -> None:
    found = world.run(_whole_table, list(TABLES), timeout=100)
    labels, _, digests = found[0]
    assert len(labels) > 1800
    failures = [failure for _, failures, _ in found for failure in failures]
    assert not failures, f"{len(failures)} rows failed:\n" + "\n".join(failures[:20])
    for rank, (_, _, theirs) in enumerate(found):
        differing = [label for label, a, b in zip(labels, digests, theirs, strict=True) if a != b]
        assert not differing, f"not bitwise equal on ranks 0 and {rank}: {differing[:20]}"
