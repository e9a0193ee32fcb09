"""Length-prefixed frames over a stream socket, without ever blocking the engine.

A frame is a little-endian uint32 byte count and that many bytes; its first byte tells what it is.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from typing import Any

__all__ = ["Link", "decode", "encode"]

_HEADER = struct.Struct("<I")
_READ_BYTES = 1 << 16
_LAST_SECONDS = 10.0


def encode(tag: bytes, message: Any) -> bytes:
    """A frame's payload: one tag byte and JSON."""
    return tag + json.dumps(message, separators=(",", ":")).encode()


def decode(payload: bytes) -> Any:
    """The JSON part of `encode`'s payload."""
    return json.loads(payload[1:])


class Link:
    """One peer's end of the control plane. Not thread-safe: one thread drives it.

    Attributes:
        told, heard: frames sent, or queued, and received so far.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._in = bytearray()
        self._out = bytearray()
        self.told = self.heard = 0

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def backlog(self) -> bool:
        """Whether bytes wait until the socket can take them."""
        return bool(self._out)

    def send(self, payload: bytes) -> None:
        """Queue one frame and pass on what the socket takes now.

        Raises:
            ConnectionError: the peer has closed.
        """
        self._out += _HEADER.pack(len(payload)) + payload
        self.told += 1
        self.flush()

    def flush(self) -> None:
        while self._out:
            try:
                sent = self.sock.send(self._out)
            except BlockingIOError:
                return
            del self._out[:sent]

    def receive(self) -> list[bytes]:
        """Whole frames that have arrived.

        Raises:
            ConnectionError: the peer has closed and nothing is left to read.
        """
        closed = False
        while True:
            try:
                data = self.sock.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                closed = True
                break
            self._in += data
            if len(data) < _READ_BYTES:
                break
        frames = self._take_frames()
        if closed and not frames:
            raise ConnectionError("closed by the peer")
        return frames

    def _take_frames(self) -> list[bytes]:
        frames = []
        start = 0
        while len(self._in) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._in, start)
            end = start + _HEADER.size + length
            if len(self._in) < end:
                break
            frames.append(bytes(self._in[start + _HEADER.size : end]))
            start = end
        del self._in[:start]
        self.heard += len(frames)
        return frames

    def receive_one(self, deadline: float) -> bytes:
        """Wait for the next single frame; only before the engine runs.

        Args:
            deadline: `time.monotonic()` value in seconds.

        Raises:
            TimeoutError: the deadline has passed.
            ConnectionError: the peer has closed.
        """
        while True:
            if len(self._in) >= _HEADER.size:
                (length,) = _HEADER.unpack_from(self._in, 0)
                end = _HEADER.size + length
                if len(self._in) >= end:
                    frame = bytes(self._in[_HEADER.size : end])
                    del self._in[:end]
                    self.heard += 1
                    return frame
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.sock], [self.sock] if self._out else [], [], left)[0]:
                if left <= 0:
                    raise TimeoutError("no answer in time")
                self.flush()
                continue
            data = self.sock.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("closed by the peer")
            self._in += data

    def close(self) -> None:
        """Close so that what was sent last still arrives: unread input would make TCP reset instead.

        Waits for a peer that is slow to read, but not for one that does not read at all.
        """
        deadline = time.monotonic() + _LAST_SECONDS
        with contextlib.suppress(OSError):
            while self._out and (left := deadline - time.monotonic()) > 0:
                readable, _, _ = select.select([self.sock], [self.sock], [], left)
                if readable and not self.sock.recv(_READ_BYTES):
                    break
                self.flush()
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(_READ_BYTES):
                pass
        self.sock.close()
