"""One rank of `run_ranks()`: `python -m hvdp.testing.worker FOLDER SECONDS`."""

from __future__ import annotations

import faulthandler
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import cloudpickle

from hvdp._core.config import environment
from hvdp.launch.environments import detect

__all__ = ["main"]


def main(folder: Path, seconds: float) -> None:
    """Make the call and leave its outcome; an exception goes on to end this rank."""
    rank = detect(environment()).rank
    with open(folder / f"stacks.{rank}", "w") as stacks:
        faulthandler.dump_traceback_later(seconds, exit=True, file=stacks)
        try:
            fn, args = pickle.loads((folder / "call").read_bytes())
            _leave(folder, rank, (True, fn(*args)))
        except BaseException:
            _leave(folder, rank, (False, traceback.format_exc()))
            raise
        finally:
            # The limit holds for the end of the process too, but then only as a last resort.
            faulthandler.cancel_dump_traceback_later()
            faulthandler.dump_traceback_later(seconds, exit=True)


def _leave(folder: Path, rank: int, outcome: tuple[bool, Any]) -> None:
    (folder / f"result.{rank}").write_bytes(cloudpickle.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
