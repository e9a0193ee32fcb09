"""Cutting a stream of bytes into lines that can be passed on whole."""

from __future__ import annotations

import re

__all__ = ["LONGEST", "LineBuffer"]

LONGEST = 1 << 20
"""Bytes without a line end after which a line is passed on in pieces."""

_END = re.compile(rb"\r\n|\n|\r")


class LineBuffer:
    """Whole lines of one stream, in bounded memory.

    A carriage return rewrites the line, as progress bars do: of such states only the newest is
    kept, in `state`, until a line end follows or the owner takes it with `take_state()`.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._rest = b""
        self.state: bytes | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Add what was read; returns the lines it completes, without their ends."""
        text = self._rest + data
        lines: list[bytes] = []
        start = 0
        for end in _END.finditer(text, len(self._rest)):
            line = text[start : end.start()]
            start = end.end()
            if end.group() == b"\r":
                self.state = line or self.state
            else:
                lines.append(line or self.state or b"")
                self.state = None
        rest = text[start:]
        while len(rest) > self._longest:
            cut = _whole_characters(rest, self._longest)
            lines.append(rest[:cut])
            rest = rest[cut:]
        self._rest = rest
        return lines

    def take_state(self) -> bytes | None:
        """The newest rewritten line, once."""
        state, self.state = self.state, None
        return state

    def close(self) -> list[bytes]:
        """What is left when the stream ends without a line end."""
        rest = self._rest or self.state or b""
        self._rest, self.state = b"", None
        return [rest] if rest else []


def _whole_characters(text: bytes, most: int) -> int:
    """The largest cut, at most `most`, that splits no UTF-8 character."""
    for cut in range(most, max(0, most - 4), -1):
        if text[cut] & 0xC0 != 0x80:
            return cut
    return most
