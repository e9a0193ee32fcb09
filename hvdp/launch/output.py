"""What the ranks print, on its way to the terminal and to files."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from hvdp.errors import LaunchError
from hvdp.launch.console import Console, OutputClosed
from hvdp.launch.last_words import LastWords
from hvdp.launch.lines import LineBuffer
from hvdp.launch.loop import Loop, Timer

__all__ = ["Output", "RankOutput"]

_READ = 1 << 16
# A pipe holds at most 1 MiB by default limits, so this empties what a dead process has left in it.
_READS_AT_END = 32
# How long a progress bar's state may be superseded before it is shown, seconds.
_STATE_PATIENCE = 1.0


class Output:
    """Where all ranks' lines meet: one writer, so that lines never tear.

    Args:
        on_closed: called when whoever read our output has gone.
        directory: also write every rank's raw output to `rank.N/stdout` and `rank.N/stderr` there.
        timestamps: begin every line with the time.
    """

    def __init__(
        self,
        loop: Loop,
        console: Console,
        size: int,
        on_closed: Callable[[], None],
        directory: Path | None = None,
        timestamps: bool = False,
    ) -> None:
        self.loop = loop
        self._console = console
        self._on_closed = on_closed
        self._timestamps = timestamps
        self.ranks = [RankOutput(self, rank, self._folder(directory, rank, size)) for rank in range(size)]

    @staticmethod
    def _folder(directory: Path | None, rank: int, size: int) -> Path | None:
        if directory is None:
            return None
        folder = directory / f"rank.{rank:0{len(str(size - 1))}d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"cannot write output below {directory}: {error.strerror}") from error
        return folder

    def emit(self, prefix: bytes, fd: int, lines: Iterable[bytes]) -> None:
        """Print whole lines on the launcher's descriptor 1 or 2."""
        if self._timestamps:
            prefix = datetime.now().isoformat(timespec="milliseconds").encode() + prefix
        text = b"".join(prefix + line + b"\n" for line in lines)
        if text:
            try:
                self._console.write(fd, text)
            except OutputClosed:
                self._on_closed()

    def complain(self, text: str) -> None:
        """A message of the launcher about output."""
        self._console.say(text)

    def close(self) -> None:
        """Read and print what is left, after the job has ended."""
        for rank in self.ranks:
            rank.close()


class RankOutput:
    """Both streams of one rank."""

    def __init__(self, output: Output, rank: int, folder: Path | None) -> None:
        self._output = output
        self.last_words = LastWords()
        self._ended = False
        self._patience: Timer | None = None
        self._prefixes = {fd: b"[%d]<%s>:" % (rank, name) for fd, name in ((1, b"stdout"), (2, b"stderr"))}
        self._streams = {
            1: _Stream(self, 1, None if folder is None else folder / "stdout"),
            2: _Stream(self, 2, None if folder is None else folder / "stderr"),
        }

    @property
    def output(self) -> Output:
        return self._output

    def attach(self, stdout: int, stderr: int) -> None:
        """Read the rank's output from these descriptors, and own them."""
        self._streams[1].attach(stdout)
        self._streams[2].attach(stderr)

    def finish(self, keep_last_words: bool) -> None:
        """The rank has ended: read what it left; keep a held traceback for the report or print it."""
        self._ended = keep_last_words
        for stream in self._streams.values():
            stream.drain()
            stream.flush()
        if self._patience is not None:
            self._patience.cancel()
        if not keep_last_words:
            self.print(2, self.last_words.release())

    def print(self, fd: int, lines: Iterable[bytes]) -> None:
        """Print lines with this rank's prefix."""
        self._output.emit(self._prefixes[fd], fd, lines)

    def take_line(self, fd: int, line: bytes) -> None:
        """A whole line of a rank that has no pipe to us."""
        self._streams[fd].save(line + b"\n")
        self.take(fd, [line])

    def take(self, fd: int, lines: list[bytes]) -> None:
        """Lines from one of the streams."""
        if fd == 1:
            self.print(1, lines)
            return
        now = time.monotonic()
        self.print(2, [ready for line in lines for ready in self.last_words.feed(line, now)])
        if self.last_words.deadline is not None and self._patience is None and not self._ended:
            self._wait_for_end(self.last_words.deadline - now)

    def _wait_for_end(self, seconds: float) -> None:
        self._patience = self._output.loop.after(seconds, self._on_patience)

    def _on_patience(self) -> None:
        self._patience = None
        deadline = self.last_words.deadline
        if deadline is None or self._ended:
            return
        if (left := deadline - time.monotonic()) > 0:
            self._wait_for_end(left)
        else:
            self.print(2, self.last_words.release())

    def close(self) -> None:
        """Release the descriptors and files."""
        for stream in self._streams.values():
            stream.drain()
            stream.close()


class _Stream:
    """One pipe from a rank."""

    def __init__(self, rank: RankOutput, fd: int, path: Path | None) -> None:
        self._rank = rank
        self._loop = rank.output.loop
        self._fd = fd
        self._file: BinaryIO | None = None if path is None else open(path, "wb")  # noqa: SIM115
        self._source: int | None = None
        self._buffer = LineBuffer()
        self._state_due: Timer | None = None

    def attach(self, source: int) -> None:
        os.set_blocking(source, False)
        self._source = source
        self._loop.watch(source, self.read)

    def read(self) -> bool:
        """Take what is there, at most one buffer; False if there is no more now or ever."""
        if self._source is None:
            return False
        try:
            data = os.read(self._source, _READ)
        except BlockingIOError:
            return False
        if not data:
            self._detach()
            return False
        self.save(data)
        self._rank.take(self._fd, self._buffer.feed(data))
        if self._buffer.state is not None and self._state_due is None:
            self._state_due = self._loop.after(_STATE_PATIENCE, self._show_state)
        return True

    def drain(self) -> None:
        for _ in range(_READS_AT_END):
            if not self.read():
                return

    def flush(self) -> None:
        """Pass on an unfinished last line."""
        self._rank.take(self._fd, self._buffer.close())

    def close(self) -> None:
        self._detach()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _detach(self) -> None:
        if self._source is not None:
            self._loop.forget(self._source)
            os.close(self._source)
            self._source = None
            self.flush()

    def _show_state(self) -> None:
        self._state_due = None
        state = self._buffer.take_state()
        if state is not None:
            self._rank.take(self._fd, [state])

    def save(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()
            path, self._file = self._file.name, None
            self._rank.output.complain(f"cannot write {path}: {error.strerror}; the file is incomplete")
