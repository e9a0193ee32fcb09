"""Recording what the engine does, for chrome://tracing or Perfetto."""

from __future__ import annotations

from hvdp._core.runtime import runtime
from hvdp._core.timeline import TraceFile
from hvdp.errors import InvalidArgumentError

__all__ = ["start_timeline", "stop_timeline"]


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record all ranks' operations into one file, written by rank 0.

    One lane a rank and process set; each operation shows when it was submitted, when all
    ranks had agreed on it and when it was done, with its bytes. The file is complete JSON after
    every write, and so after a kill. HOROVOD_TIMELINE=FILE does the same from the start.

    Every rank may call it; on other ranks than 0 it does nothing. A running timeline is ended.

    Args:
        mark_cycles: also mark rank 0's rounds.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """
    engine = runtime.require("start_timeline")
    if engine.rank == 0:
        try:
            file = TraceFile(file_path, mark_cycles)
        except OSError as error:
            raise InvalidArgumentError(f"the timeline cannot be written to {file_path!r}: {error}") from error
        engine.trace_to(file)


def stop_timeline() -> None:
    """End the timeline; every rank may call it."""
    engine = runtime.require("stop_timeline")
    if engine.rank == 0:
        engine.trace_to(None)
