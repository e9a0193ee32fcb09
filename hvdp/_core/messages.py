"""The frames of the control plane. One tag byte, then packed numbers or JSON.

To rank 0:
    s   submissions known by number: (number, extras) again and again
    S   one submission in full: [signature, extras, error]
    w   a submission known by number that was offered in shared memory before: (agreement, number)
To a member:
    v   verdicts known by number, in order: (number, extras) again and again
    V   verdicts in full, in order; numbers that are new come in here
Either way:
    G   goodbye: the reason why this rank leaves; from others than rank 0 it is answered by
    g   leave to go: there is no verdict on the way any more; then `g` back: this rank has run them all
    A   abort: [rank that failed first, text]
    T   timeline: true or false from rank 0 (record or not), records to it
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvdp._core.coordinator import Submission, Verdict
from hvdp._core.ops import Signature
from hvdp._core.wire import decode, encode

__all__ = [
    "Notice",
    "pack_known",
    "read_submission",
    "read_verdicts",
    "read_withdrawn",
    "submission_frame",
    "verdict_frame",
    "withdrawn_frame",
]

_HEAD = struct.Struct("<II")
_WITHDRAWN = struct.Struct("<QI")


class Notice(NamedTuple):
    """A verdict as a member receives it; fields as in Verdict.

    Attributes:
        extras: of all members, one after the other.
    """

    signature: Signature
    extras: tuple[int, ...] = ()
    number: int = -1
    absent: tuple[int, ...] = ()
    error: str = ""
    gone: int = -1
    invalid: bool = False


def pack_known(number: int, extras: Sequence[int]) -> bytes:
    """One entry of an `s` or `v` frame."""
    return _HEAD.pack(number, len(extras)) + struct.pack(f"<{len(extras)}q", *extras)


def unpack_known(frame: bytes) -> list[tuple[int, tuple[int, ...]]]:
    """All entries of an `s` or `v` frame."""
    entries = []
    at = 1
    while at < len(frame):
        number, count = _HEAD.unpack_from(frame, at)
        at += _HEAD.size
        entries.append((number, struct.unpack_from(f"<{count}q", frame, at)))
        at += 8 * count
    return entries


def submission_frame(submission: Submission) -> bytes:
    return encode(b"S", [submission.signature, submission.extras, submission.error])


def read_submission(frame: bytes, known: Callable[[int], Signature]) -> list[Submission]:
    """The submissions of an `s` or `S` frame."""
    if frame[:1] == b"s":
        return [Submission(known(number), extras) for number, extras in unpack_known(frame)]
    signature, extras, error = decode(frame)
    return [Submission(Signature.from_json(signature), tuple(extras), error)]


def withdrawn_frame(agreement: int, number: int) -> bytes:
    return b"w" + _WITHDRAWN.pack(agreement, number)


def read_withdrawn(frame: bytes) -> tuple[int, int]:
    """The agreement that an offer was for, and the operation's number."""
    agreement, number = _WITHDRAWN.unpack_from(frame, 1)
    return agreement, number


def verdict_frame(verdicts: Sequence[Verdict]) -> bytes:
    """The shortest frame for verdicts that the same members are told."""
    flat = [[number for member in verdict.extras for number in member] for verdict in verdicts]
    if all(verdict.number >= 0 and not verdict.new and not verdict.absent for verdict in verdicts):
        return b"v" + b"".join(pack_known(v.number, extras) for v, extras in zip(verdicts, flat, strict=True))
    return encode(
        b"V",
        [
            [v.signature, extras, v.number, v.absent, v.error, v.gone, v.invalid]
            for v, extras in zip(verdicts, flat, strict=True)
        ],
    )


def read_verdicts(frame: bytes, known: Callable[[int], Signature]) -> list[Notice]:
    """The verdicts of a `v` or `V` frame."""
    if frame[:1] == b"v":
        return [Notice(known(number), extras, number) for number, extras in unpack_known(frame)]
    return [
        Notice(Signature.from_json(signature), tuple(extras), number, tuple(absent), *rest)
        for signature, extras, number, absent, *rest in decode(frame)
    ]
