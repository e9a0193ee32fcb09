"""Reading a launcher's variables with errors that say what to do."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping

from hvdp.errors import RendezvousError

__all__ = ["complete", "has", "inherited_pipe", "number", "unix_name"]

# An abstract socket's name has 107 bytes; the engine may append to ours.
_LONGEST = 90


def has(env: Mapping[str, str], *names: str) -> bool:
    """Whether every one of the variables is set to something."""
    return all(env.get(name) for name in names)


def number(env: Mapping[str, str], name: str, launcher: str, least: int = 0) -> int:
    """The integer in a variable that the launcher must have set.

    Raises:
        RendezvousError: it is missing, not an integer, or below `least`.
    """
    text = env.get(name, "")
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        received = f"{name}={text!r}" if name in env else f"{name} is not set"
        raise RendezvousError(
            f"{launcher} should have set {name} to an integer of at least {least}. "
            "Unset the variables left over from another launcher, or start the job again with one launcher. "
            f"Received: {received}"
        )
    return value


def complete(env: Mapping[str, str], launcher: str, rank: str, size: str) -> tuple[int, int]:
    """Rank and size, checked against each other.

    Raises:
        RendezvousError: one is missing or wrong, or the rank does not lie below the size.
    """
    r, n = number(env, rank, launcher), number(env, size, launcher, least=1)
    if r >= n:
        raise RendezvousError(
            f"{launcher} gave this process a rank that does not lie below the number of processes. "
            "Unset the variables left over from another launcher, or start the job again with one launcher. "
            f"Received: {rank}={r}, {size}={n}"
        )
    return r, n


def unix_name(*parts: object) -> str:
    """The address of a job on one host: an abstract socket no other job or user has."""
    name = "-".join(str(part) for part in ("hvdp", *parts, f"u{os.getuid()}"))
    if len(name.encode()) > _LONGEST:
        name = "hvdp-" + hashlib.sha256(name.encode()).hexdigest()
    return f"unix:{name}"


def inherited_pipe(env: Mapping[str, str]) -> int | None:
    """The supervisor's pipe, if this process still has it.

    A program between the launcher and us may have closed the descriptor, and its number may by
    now mean another file, so the pipe's inode is compared before anyone writes to it.
    """
    text, inode = env.get("HVDP_SUPERVISOR_FD", ""), env.get("HVDP_SUPERVISOR_INODE", "")
    if not text.isdecimal():
        return None
    try:
        found = os.fstat(int(text))
    except OSError:
        return None
    if not stat.S_ISFIFO(found.st_mode) or (inode and inode != str(found.st_ino)):
        return None
    return int(text)
