"""One rank of `run_ranks()`: `python -m hvdp.testing.worker FOLDER SECONDS`.

`python -m hvdp.testing.worker --warm ADDRESS MODULE...` imports the modules and makes call after call, each
in a child; the socket at ADDRESS tells of them, and is told when one has returned.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from hvdp._core.config import environment
from hvdp.launch.environments import detect

__all__ = ["main", "serve"]


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


def serve(address: str, *modules: str) -> None:
    """Make call after call, each in a child."""
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # what is collected in no child is copied for none
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)
        for order in link.makefile("r"):
            child = os.fork()
            if child == 0:
                link.close()
                folder, seconds, variables = json.loads(order)
                os.environ.update(variables)
                main(Path(folder), seconds)
                _end()
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            if code:
                _end_as(code)
            link.sendall(b".")


def _end() -> NoReturn:
    """End well, but leave all modules as they are: taking torch down takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_as(code: int) -> None:
    """As the child that has failed, so that the launcher sees what it always sees."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _leave(folder: Path, rank: int, outcome: tuple[bool, Any]) -> None:
    (folder / f"result.{rank}").write_bytes(cloudpickle.dumps(outcome))


if __name__ == "__main__":
    if sys.argv[1] == "--warm":
        serve(*sys.argv[2:])
    else:
        main(Path(sys.argv[1]), float(sys.argv[2]))
        _end()
