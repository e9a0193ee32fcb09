"""Do all ranks still hold the same values? Found out by 64 bits for each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdp._core import submit
from hvdp._core.objects import allgather_object
from hvdp._core.runtime import runtime
from hvdp._core.submit import Options
from hvdp.errors import MismatchError

__all__ = ["Drift", "Entry", "digest", "find_drift", "require_same"]


def digest(data: Any) -> int:
    """64 bits of a hash of a contiguous array's bytes, or of bytes."""
    return int.from_bytes(hashlib.sha1(data, usedforsecurity=False).digest()[:8], "little")


@dataclass(frozen=True)
class Entry:
    """A value that should be equal on all ranks.

    Attributes:
        label: what it is, for messages.
        digest: of its bytes.
        key: by which the ranks match it, where labels differ between them; the label itself if empty.
    """

    label: str
    digest: int
    key: str = ""


@dataclass(frozen=True)
class Drift:
    """The first entry that differs.

    Attributes:
        index: of the entry; that of the first missing one where the ranks have different entries.
        parties: the ranks, those with equal values together.
        more: how many other entries differ as well.
    """

    index: int
    label: str
    parties: tuple[tuple[int, ...], ...]
    more: int = 0
    missing: bool = False

    def __str__(self) -> str:
        if self.missing:
            return f"{self.label} is missing on ranks {list(self.parties[1])}"
        parties = " and ".join(str(list(party)) for party in self.parties)
        rest = f" ({self.more} more differ)" if self.more else ""
        return f"{self.label} differs between ranks {parties}{rest}"


def find_drift(what: str, entries: Sequence[Entry], process_set: int = 0) -> Drift | None:
    """Compare all ranks' entries, in one small allgather; collective.

    Args:
        what: name of the collective.
    """
    rank = runtime.require(what).rank
    labels = digest("\n".join(entry.key or entry.label for entry in entries).encode())
    own = np.array([rank, len(entries), labels, *(entry.digest for entry in entries)], np.uint64)
    gathered = submit.at_once(submit.allgather(own, Options(f"{what}.digests", process_set)))
    rows: dict[int, list[int]] = {}
    values = gathered.tolist()
    while values:
        member, count = values[:2]
        rows[member], values = values[2 : 3 + count], values[3 + count :]
    if len({(len(row), row[0]) for row in rows.values()}) > 1:
        return _find_missing(what, entries, process_set)
    differing = [index for index in range(len(entries)) if len({row[1 + index] for row in rows.values()}) > 1]
    if not differing:
        return None
    first = differing[0]
    parties: dict[int, list[int]] = {}
    for member, row in rows.items():
        parties.setdefault(row[1 + first], []).append(member)
    return Drift(first, entries[first].label, tuple(map(tuple, parties.values())), len(differing) - 1)


def require_same(what: str, entries: Sequence[Entry], process_set: int = 0, step: int = 0) -> None:
    """As `find_drift`.

    Args:
        step: after which one; 0 if nobody counted.

    Raises:
        MismatchError: an entry differs; on every rank.
    """
    drift = find_drift(what, entries, process_set)
    if drift is not None:
        when = f" after step {step}" if step else ""
        raise MismatchError(f"the ranks have drifted apart{when}: {drift}.")


def _find_missing(what: str, entries: Sequence[Entry], process_set: int) -> Drift:
    everything = allgather_object(
        (runtime.require(what).rank, [entry.key or entry.label for entry in entries]),
        f"{what}.labels",
        process_set,
    )
    everywhere = list(dict.fromkeys(label for _, labels in everything for label in labels))
    for index, label in enumerate(everywhere):
        without = tuple(rank for rank, labels in everything if label not in labels)
        if without:
            owners = tuple(rank for rank, labels in everything if label in labels)
            return Drift(index, label, (owners, without), missing=True)
    return Drift(0, "the order of the entries", tuple((rank,) for rank, _ in everything))
