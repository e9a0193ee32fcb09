"""Which hosts a job names, and whether they are all this one."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdp.errors import LaunchError

__all__ = ["Host", "is_here", "parse_hostfile", "parse_hosts", "place_ranks"]


@dataclass(frozen=True)
class Host:
    """A host and how many ranks it has room for."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """`host:slots,host:slots`; a host without slots has one.

    Raises:
        LaunchError: a name is empty or a number of slots is no positive integer.
    """
    hosts = []
    for item in text.split(","):
        name, colon, slots = item.strip().rpartition(":")
        if not colon:
            name, slots = slots, "1"
        hosts.append(_host(name, slots, f"-H wants host:slots,host:slots. Received: {text!r}"))
    return hosts


def parse_hostfile(path: Path) -> list[Host]:
    """One host a line: `name slots=N` or `name:N`; `#` begins a comment.

    Raises:
        LaunchError: the file cannot be read or a line cannot be understood.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise LaunchError(f"cannot read the host file {path}: {error.strerror}") from error
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].strip()
        if not words:
            continue
        match = re.fullmatch(r"([^\s:]+)(?:\s*:\s*(\S+)|\s+(?:slots|max_slots)\s*=\s*(\S+))?", words)
        complaint = f"line {number} of {path} should read 'host slots=N'. Received: {line!r}"
        if match is None:
            raise LaunchError(complaint)
        hosts.append(_host(match[1], match[2] or match[3] or "1", complaint))
    if not hosts:
        raise LaunchError(f"the host file {path} names no host: write one 'host slots=N' a line")
    return hosts


def _host(name: str, slots: str, complaint: str) -> Host:
    if not name or not slots.isdecimal() or int(slots) < 1:
        raise LaunchError(complaint)
    return Host(name, int(slots))


def is_here(host: Host) -> bool:
    """Whether the name is plainly this machine's; asks no name server."""
    own = socket.gethostname()
    return host.name in {"localhost", "127.0.0.1", "::1", own, own.partition(".")[0]}


def place_ranks(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """The hosts that are needed, filled in order, with the ranks each gets as slots.

    Raises:
        LaunchError: there are not enough slots.
    """
    left, placed = ranks, []
    for host in hosts:
        take = min(left, host.slots)
        if take:
            placed.append(Host(host.name, take))
        left -= take
    if left:
        raise LaunchError(
            f"-np {ranks} asks for more ranks than the hosts have slots for ({ranks - left}): "
            "give a host more slots, as in -H localhost:4, or ask for fewer ranks"
        )
    return placed
