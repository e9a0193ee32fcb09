"""Anonymous shared memory (memfd) that the processes of one host hand to each other.

The memory has no name anywhere: when the last process that mapped it ends, however it
ends, it is gone. Its descriptor travels over an abstract Unix socket, which leaves no file.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from hvdp._core.arrays import Array
from hvdp.errors import TransportError
from hvdp.transports.base import Pause

__all__ = ["SegmentExchange"]

_UCRED = struct.Struct("3i")
_TOKEN_BYTES = 32
_MESSAGE_BYTES = 4096
_CGROUP = Path("/sys/fs/cgroup")
_WAIT_SECONDS = 0.01
_DEATH_SECONDS = 10.0


class SegmentExchange:
    """Creates segments for, and fetches them from, the other ranks of this host.

    Args:
        name: unique to this job, start and host; one abstract socket `name.RANK` a rank.
        secret: shared by the ranks of the job.
        rank: this process's global rank.
    """

    def __init__(self, name: str, secret: bytes, rank: int) -> None:
        self._name = name
        self._secret = secret
        # Ranks that are ahead and ask for a later segment while another still fetches this one.
        self._early: dict[bytes, list[socket.socket]] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{name}.{rank}")
        self._listener.listen(1024)
        self._listener.setblocking(False)

    def close(self) -> None:
        self._listener.close()
        for sock in [sock for waiting in self._early.values() for sock in waiting]:
            sock.close()

    def create(self, key: str, nbytes: int, takers: int, pause: Pause) -> Array:
        """Make a zeroed segment and hand it to `takers` ranks that `fetch` it under `key`.

        Returns:
            A writable uint8 array of `nbytes` bytes; the memory lives as long as any such array.

        Raises:
            TransportError: there is no room; the takers are told and raise the same.
        """
        fault = _no_room(nbytes)
        fd = os.memfd_create("hvdp", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            segment = _map(fd)
            for _ in range(takers):
                with self._accept(self._token(key), pause) as taker:
                    message = [fault.encode() or b"ok"]
                    with _until_told_of_a_death(pause):
                        socket.send_fds(taker, message, [] if fault else [fd])
        finally:
            os.close(fd)
        if fault:
            raise TransportError(fault)
        return segment

    def fetch(self, key: str, owner: int, pause: Pause) -> Array:
        """Map the segment that rank `owner` creates under `key`, all of it; see `create`."""
        with self._connect(owner, pause) as sock, _until_told_of_a_death(pause):
            sock.sendall(self._token(key))
            while not select.select([sock], [], [], 0)[0]:
                pause(_WAIT_SECONDS)
            message, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 1)
            if not message:
                raise ConnectionError(f"rank {owner} refused to share a memory segment")
        if not fds:
            raise TransportError(message.decode())
        try:
            return _map(fds[0])
        finally:
            os.close(fds[0])

    def _token(self, key: str) -> bytes:
        return hmac.new(self._secret, f"{self._name}/{key}".encode(), hashlib.sha256).digest()

    def _accept(self, token: bytes, pause: Pause) -> socket.socket:
        """The next connection by our own user that shows the token."""
        while not self._early.get(token):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                pause(_WAIT_SECONDS)
                continue
            sock.settimeout(5)
            with contextlib.suppress(OSError):
                _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
                if uid == os.getuid():
                    self._early.setdefault(sock.recv(_TOKEN_BYTES), []).append(sock)
                    continue
            sock.close()
        return self._early[token].pop(0)

    def _connect(self, owner: int, pause: Pause) -> socket.socket:
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(f"\0{self._name}.{owner}")
                return sock
            except (ConnectionRefusedError, BlockingIOError):
                sock.close()
                pause(_WAIT_SECONDS)


@contextlib.contextmanager
def _until_told_of_a_death(pause: Pause) -> Iterator[None]:
    """A peer that hangs up has died: the control plane, which `pause` hears, is about to say who."""
    try:
        yield
    except ConnectionError:
        deadline = time.monotonic() + _DEATH_SECONDS
        while time.monotonic() < deadline:
            pause(_WAIT_SECONDS)
        raise


def _map(fd: int) -> Array:
    mapping = mmap.mmap(fd, 0)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def _no_room(nbytes: int) -> str:
    """Why a segment would not fit, or ""; touching it later would end in a kill, not an error."""
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        available = min(available, limit - int((_CGROUP / "memory.current").read_text()))
    if nbytes <= available:
        return ""
    return (
        f"no room for {nbytes / 2**20:.0f} MiB of shared memory: {available / 2**20:.0f} MiB are available "
        f"on {socket.gethostname()}. Run fewer ranks on this host, or a smaller model."
    )
