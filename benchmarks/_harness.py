"""What the benchmarks share: one world for all contenders, paired timing, reports.

Every contender lives in the same processes and takes its turn in every repetition, so that
whatever else the machine does falls on all of them alike. A repetition's time is that of the
slowest rank, after a barrier.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
VERSIONS_OF = ("hvdp", "torch", "mpi4py", "mpich", "horovod")


def parse_arguments(description: str) -> argparse.Namespace:
    """The flags of a benchmark; starts it again under `mpiexec` where it is not yet."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-np", type=int, default=2, help="ranks to start (%(default)s)")
    parser.add_argument("--json", type=Path, help="file to write all results to")
    parser.add_argument("--quick", action="store_true", help="small and few: does it run at all")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these contenders or models alone")
    args = parser.parse_args()
    if not any(name in os.environ for name in RANK_VARIABLES):
        _start_again(args.np)
    return args


def _start_again(ranks: int) -> NoReturn:
    beside_python = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside_python) if beside_python.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        sys.exit("mpiexec is needed: pip install '.[mpich]', or an MPI of your own and '.[mpi]'")
    os.environ.setdefault("OMP_NUM_THREADS", str(share_of_cores(ranks)))
    os.execv(mpiexec, [mpiexec, "-n", str(ranks), sys.executable, *sys.argv])


def share_of_cores(ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // ranks)


class World:
    """The ranks of this run, joined by every library that takes part."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        from mpi4py import MPI

        import hvdp.torch as hvd

        self.mpi = MPI.COMM_WORLD
        self.rank: int = self.mpi.Get_rank()
        self.size: int = self.mpi.Get_size()
        self.threads = share_of_cores(self.size)
        torch.set_num_threads(self.threads)
        hvd.init()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        folder = self.mpi.bcast(tempfile.mkdtemp() if self.rank == 0 else None)
        store = dist.FileStore(os.path.join(folder, "store"), self.size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)
        if has_horovod():
            import horovod.torch

            horovod.torch.init()
        self._folder: str = folder
        self._load = os.getloadavg()[0]

    def close(self) -> None:
        import torch.distributed as dist

        import hvdp.torch as hvd

        self.mpi.Barrier()
        dist.destroy_process_group()
        hvd.shutdown()
        if self.rank == 0:
            shutil.rmtree(self._folder)

    def paired(
        self,
        contenders: Mapping[str, Callable[[], object]],
        repetitions: int,
        prepare: Callable[[], object] = lambda: None,
        burst: int = 1,
    ) -> dict[str, list[float]]:
        """Seconds of each contender in each repetition, the slowest rank's; the order rotates.

        Args:
            burst: calls in a repetition, which counts as their mean. Before more than one an
                uncounted call brings the contender's own data back into the caches.
        """
        names = list(contenders)
        times: dict[str, list[float]] = {name: [] for name in names}
        for repetition in range(repetitions):
            first = repetition % len(names)
            for name in names[first:] + names[:first]:
                prepare()
                if burst > 1:
                    contenders[name]()
                self.mpi.Barrier()
                began = time.perf_counter()
                for _ in range(burst):
                    contenders[name]()
                times[name].append((time.perf_counter() - began) / burst)
        everyone: list[dict[str, list[float]]] = self.mpi.allgather(times)
        return {
            name: [max(turn) for turn in zip(*(t[name] for t in everyone), strict=True)] for name in names
        }

    def report(self, args: argparse.Namespace, results: Sequence[Mapping[str, Any]]) -> None:
        """Write the JSON file: the results and what they were measured on."""
        if args.json and self.rank == 0:
            setting = {
                "ranks": self.size,
                "threads_per_rank": self.threads,
                "cores": len(os.sched_getaffinity(0)),
                "machine": platform.machine(),
                "python": platform.python_version(),
                "versions": {name: version for name in VERSIONS_OF if (version := _version(name))},
                "variables": {k: v for k, v in os.environ.items() if k.startswith(("HVDP_", "HOROVOD_"))},
                "load_average_at_start": self._load,  # well above 0: others used the machine too
                "quick": args.quick,
            }
            args.json.write_text(json.dumps({"setting": setting, "results": results}, indent=1) + "\n")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def has_horovod() -> bool:
    """Whether the original is installed; a shim of that import name does not count."""
    return _version("horovod") is not None


def paired_ratio(peer: Sequence[float], ours: Sequence[float]) -> float:
    """Median over repetitions of peer / ours: above 1, ours is faster."""
    return median(theirs / mine for theirs, mine in zip(peer, ours, strict=True))
