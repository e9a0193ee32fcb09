"""The texts of errors that every rank raises: what was received, on which ranks, what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdp._core.ops import Signature

__all__ = [
    "absent",
    "crossed",
    "exception",
    "farewell",
    "gone",
    "invalid",
    "mismatch",
    "ranks_text",
    "windows",
]

_SHOWN = 8


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 1, 2"."""
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN]) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def exception(error: Exception) -> str:
    """Its kind and words, in letters that can be sent; whatever its own `__str__` may do."""
    try:
        words = str(error)
    except Exception:  # noqa: BLE001 - the user's own code
        words = "(it has no text)"
    return f"{type(error).__name__}: {words}".encode(errors="backslashreplace").decode()


def farewell(rank: int, how: str) -> str:
    """How a rank has left, as its peers are told after "rank N "; rank 0 takes the coordinator along."""
    if rank:
        return how
    return (
        f"{how}, and no call works without rank 0, not even in process sets that it is not in: let it "
        "leave last, for example after hvd.barrier() on all ranks"
    )


def gone(rank: int, reason: str, signature: Signature) -> str:
    return f"rank {rank} {reason} before it took part in {_call(signature)}"


def absent(ranks: Sequence[int], signature: Signature) -> str:
    return f"{_call(signature)} needs {ranks_text(ranks)}, which called join() and has no more data"


def invalid(errors: Mapping[int, str]) -> str:
    """Args: errors: "" for the ranks that are right."""
    return "; ".join(f"{ranks_text(ranks)}: {error}" for error, ranks in _holders(errors).items() if error)


def mismatch(signatures: Mapping[int, Signature]) -> str:
    """Every field that differs, with the ranks that hold each of its values."""
    first = next(iter(signatures.values()))
    fields = dict.fromkeys(name for signature in signatures.values() for name in first.differences(signature))
    parts = []
    for name in fields:
        values = {rank: getattr(signature, name) for rank, signature in signatures.items()}
        texts = {rank: str(getattr(value, "value", value)) for rank, value in values.items()}
        held = ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in _holders(texts).items())
        parts.append(f"{name} is {held}")
    return (
        f"the ranks disagree about {_call(first)}: {'; '.join(parts)}. "
        "Every rank must submit the same under one name."
    )


def windows(numbers: Mapping[int, int]) -> str:
    """Args: numbers: of each rank's window; empty if not known."""
    held = ", ".join(f"the one after {n} on {ranks_text(ranks)}" for n, ranks in _holders(numbers).items())
    return (
        f"the ranks reduce gradients of different steps{': ' if held else ''}{held}. Every rank must make "
        "as many backward() calls as the others between two steps, and step, or skip a step, together "
        "with them."
    )


def crossed(name: str, sets: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    """Args: sets: for each process set its members and those of them that submitted the name."""
    parts = [f"{ranks_text(sorted(by))} in the one of {ranks_text(members)}" for members, by in sets]
    return (
        f"{name!r} was submitted in different process sets: by {', by '.join(parts)}, so that ranks wait for "
        "each other. Give the tensor another name in each process set."
    )


def _call(signature: Signature) -> str:
    return f"{signature.kind.value} {signature.name!r}"


def _holders(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found
