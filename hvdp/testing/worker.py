"""One rank of `run_ranks()`: `python -m hvdp.testing.worker FOLDER SECONDS`.

`python -m hvdp.testing.worker --warm ADDRESS` makes call after call, each in a child; the socket at
ADDRESS tells of them, and is told when one has returned. `python -m hvdp.testing.worker --zygote FD
MODULE...` imports the modules and forks processes like this one for stand-ins (`zygote.py`).
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import pickle
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from hvdp._core.config import environment
from hvdp.launch.environments import detect
from hvdp.testing import zygote

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


def serve(address: str) -> None:
    """Make call after call, each in a child."""
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
                zygote.end_as(code)
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


def _leave(folder: Path, rank: int, outcome: tuple[bool, Any]) -> None:
    (folder / f"result.{rank}").write_bytes(cloudpickle.dumps(outcome))


def _become_zygote(listener: int, *modules: str) -> list[str]:
    """Returns in each child, with its arguments."""
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # what is collected in no child is copied for none
    return zygote.serve(socket.socket(fileno=listener))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0] == "--zygote":
        arguments = _become_zygote(int(arguments[1]), *arguments[2:])
    if arguments[0] == "--warm":
        serve(arguments[1])
    else:
        main(Path(arguments[0]), float(arguments[1]))
    _end()
