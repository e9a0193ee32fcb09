"""`run_ranks()`: one function on several real ranks, started by the real launcher."""

from __future__ import annotations

import contextlib
import pickle
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from hvdp.testing.scripts import Completed, run_script
from hvdp.testing.warm import fast_worker, warm_ranks

__all__ = ["RanksFailed", "run_ranks"]

# Seconds between the ranks' own time limit and the launcher's, for stacks to be written and ranks to end.
_TO_END = 12.0
_MOST_OUTPUT = 20_000


class RanksFailed(AssertionError):
    """Some rank raised, died or ran out of time; the text tells of every rank."""


def run_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    mpi: bool = False,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    warm: bool = False,
) -> list[Any]:
    """Call `fn(*args)` in `size` processes and return what each returned, in rank order.

    Args:
        fn: any function, also one of a test module; it learns its rank from `hvdp.rank()`.
        mpi: start the processes through `mpiexec`.
        env: variables on top of this process's own.
        timeout: seconds after which every rank's stacks are dumped and everything is killed.
        warm: fork the ranks from a process that has torch imported and, without `mpi`, from ranks
            that an earlier call has started. Not where `env` has other variables than hvdp's.

    Raises:
        RanksFailed: with every rank's traceback, stacks or exit, and what the job printed.
    """
    with tempfile.TemporaryDirectory(prefix="hvdp-test-") as name:
        folder = Path(name)
        with _by_value(fn):
            (folder / "call").write_bytes(cloudpickle.dumps((fn, args)))
        env = env or {}
        warm = warm and all(key.startswith(("HVDP_", "HOROVOD_")) for key in env)
        if warm and not mpi:
            done = warm_ranks(size).call(folder, timeout, env, timeout + _TO_END)
        else:
            done = run_script(
                [
                    *(sys.executable, "-m", "hvdp.launch", "-np", str(size)),
                    *(["--mpi"] if mpi else []),
                    *(fast_worker() if warm else (sys.executable, "-m", "hvdp.testing.worker")),
                    *(name, str(timeout)),
                ],
                env=env,
                timeout=timeout + _TO_END,
            )
        outcomes = [_Outcome(folder, rank) for rank in range(size)]
        if done.status == 0 and all(outcome.returned for outcome in outcomes):
            return [outcome.value for outcome in outcomes]
        raise RanksFailed(_account(fn, done, outcomes, timeout))


class _Outcome:
    """What one rank's worker left in the folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.returned = False
        self.value: Any = None
        stacks = folder / f"stacks.{rank}"
        self.stacks = stacks.read_text(errors="replace") if stacks.exists() else ""
        result = folder / f"result.{rank}"
        self.text = "ended without a result"
        if result.exists():
            try:
                self.returned, self.value = pickle.loads(result.read_bytes())
            except Exception as error:  # noqa: BLE001 whatever a returned object does when it is loaded
                self.text = f"its result cannot be loaded here: {error!r}"
            else:
                self.text = f"returned {self.value!r:.200}" if self.returned else str(self.value)


def _account(fn: Callable[..., Any], done: Completed, outcomes: list[_Outcome], timeout: float) -> str:
    name = getattr(fn, "__qualname__", repr(fn))
    late = done.timed_out or any(outcome.stacks for outcome in outcomes)
    head = f"{name}() on {len(outcomes)} ranks "
    head += f"did not end within {timeout:g} s" if late else f"failed; the launcher's status is {done.status}"
    parts = [head]
    for outcome in outcomes:
        parts.append(f"--- rank {outcome.rank}: {outcome.text.rstrip()}")
        if outcome.stacks:
            parts.append(f"--- rank {outcome.rank}, stacks at the time limit:\n{outcome.stacks.rstrip()}")
    for stream, text in (("stdout", done.stdout), ("stderr", done.stderr)):
        if text.strip():
            parts.append(f"--- {stream} of the job:\n{text[-_MOST_OUTPUT:].rstrip()}")
    return "\n".join(parts)


@contextlib.contextmanager
def _by_value(fn: Callable[..., Any]) -> Iterator[None]:
    """Send the functions of test modules whole, for a rank has no way to import them."""
    home = sys.modules.get(getattr(fn, "__module__", ""))
    registered = []
    if home is not None and _is_local(home):
        folder = Path(str(home.__file__)).parent
        for module in list(sys.modules.values()):
            if _is_local(module) and Path(str(module.__file__)).is_relative_to(folder):
                with contextlib.suppress(ValueError):
                    cloudpickle.register_pickle_by_value(module)
                    registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _is_local(module: ModuleType) -> bool:
    """Whether the module belongs to neither Python, an installed distribution nor hvdp."""
    file = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or file is None or module.__name__ == "__main__":
        return False
    paths = sysconfig.get_paths()
    installed = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]]
    installed.append(str(Path(__file__).parents[1]))
    return not any(Path(file).is_relative_to(folder) for folder in installed)
