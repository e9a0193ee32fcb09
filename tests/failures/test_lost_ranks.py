"""One rank is lost in mid-training: the job ends soon, says why once, and leaves nothing behind."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvdp.launch.guardian import remove_files
from hvdp.testing import Completed, run_script

NUMPY = """
import os, signal, sys
import numpy as np
import hvdp as hvd
from hvdp.launch.environments import detect

hvd.init()
print(f"pid={os.getpid()} address={detect(os.environ).address} rank={hvd.rank()}", flush=True)
for step in range(100_000):
    for size in (10, 300_000):
        hvd.allreduce(np.ones(size, np.float32), name=f"gradient of {size}")
    if hvd.rank() == 1 and step == 20:
        ACT
"""

TORCH = """
import os, signal, sys
import torch
import hvdp.torch as hvd
from hvdp.launch.environments import detect

hvd.init()
print(f"pid={os.getpid()} address={detect(os.environ).address} rank={hvd.rank()}", flush=True)
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Tanh(), torch.nn.Linear(300, 300))
hvd.broadcast_parameters(model.state_dict())
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(4, 300)).square().mean().backward()
    if hvd.rank() == 1 and step == 20:
        ACT
    optimizer.step()
"""

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
LOADER = """
import os, signal, time
import torch
import hvdp.torch as hvd
from hvdp.launch.environments import detect

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        assert not hvd.is_initialized()
        return torch.tensor(float(index) ** 2)

hvd.init()
hvd.allreduce(torch.ones(3))
loader = torch.utils.data.DataLoader(
    Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork", persistent_workers=True
)
print(f"pid={os.getpid()} address={detect(os.environ).address} rank={hvd.rank()}", flush=True)
for epoch in range(2):
    seen = sum(float(hvd.allreduce(batch, op=hvd.Sum).sum()) for batch in loader)
    assert seen == hvd.size() * sum(i * i for i in range(40)), seen
print("read everything", flush=True)
"""


def _run(folder: Path, how: str, program: str, size: int = 3) -> tuple[Completed, dict[int, tuple[int, str]]]:
    """Through the launcher; also each rank's process id and the job's address."""
    script = folder / "train.py"
    script.write_text(program)
    flags = ["--mpi"] if how == "mpi" else []
    done = run_script(
        [sys.executable, "-m", "hvdp.launch", "-np", str(size), *flags, sys.executable, script],
        env={"HVDP_CPU_OPERATIONS": how},
        timeout=100,
    )
    told = re.findall(r"pid=(\d+) address=(\S+) rank=(\d+)", done.stdout)
    return done, {int(rank): (int(pid), address) for pid, address, rank in told}


def _check_nothing_is_left(ranks: dict[int, tuple[int, str]], size: int = 3) -> None:
    """Memory is anonymous, so that it is gone with the processes that mapped it."""
    assert sorted(ranks) == list(range(size))
    assert [pid for pid, _ in ranks.values() if psutil.pid_exists(pid)] == []
    sockets = Path("/proc/net/unix").read_text()
    for _, address in ranks.values():
        assert address.partition(":")[2].partition("#")[0] not in sockets or address == "mpi"


ACTS = [
    pytest.param(KILL, 137, "killed by signal 9 (SIGKILL)", 0, id="killed"),
    pytest.param("raise ValueError('no more cats')", 1, "exited with status 1", 1, id="raises"),
    pytest.param("sys.exit(3)", 3, "exited with status 3", 0, id="exits"),
]


@pytest.mark.parametrize("how", ["shm", "mpi"])
@pytest.mark.parametrize(("act", "status", "report", "tracebacks"), ACTS)
def test_a_lost_rank_ends_the_job(
    how: str, act: str, status: int, report: str, tracebacks: int, tmp_path: Path
) -> None:
    done, ranks = _run(tmp_path, how, NUMPY.replace("ACT", act))
    _check_report(done, status, report, tracebacks)
    assert done.seconds < 10
    _check_nothing_is_left(ranks)


@pytest.mark.parametrize(("act", "status", "report", "tracebacks"), ACTS)
def test_a_lost_rank_ends_the_training(
    act: str, status: int, report: str, tracebacks: int, tmp_path: Path
) -> None:
    """Torch may take longer to end than the launcher holds back a traceback, so others' may be shown."""
    done, ranks = _run(tmp_path, "shm", TORCH.replace("ACT", act), size=2)
    _check_report(done, status, report, None, size=2)
    assert done.stderr.count("[1]<stderr>:Traceback") == tracebacks
    _check_nothing_is_left(ranks, size=2)


def _check_report(done: Completed, status: int, report: str, tracebacks: int | None, size: int = 3) -> None:
    assert not done.timed_out, done.stderr
    assert done.status == status, done.stderr
    assert done.stderr.splitlines()[-1] == f"hvdprun: rank 1 of {size} failed: {report}", done.stderr
    assert done.stderr.count("failed:") == 1, done.stderr
    if tracebacks is None:
        return
    assert done.stderr.count("Traceback") == done.stderr.count("ValueError: no more cats") == tracebacks
    assert done.stderr.count("stopped by the failure of rank 1") <= size - 1
    assert "HorovodInternalError" not in done.stderr, done.stderr


def test_forked_loader_workers_are_no_ranks(tmp_path: Path) -> None:
    done, ranks = _run(tmp_path, "shm", LOADER, size=2)
    assert done.status == 0, done.stderr
    assert done.stdout.count("read everything") == 2
    assert done.stderr == ""
    _check_nothing_is_left(ranks, size=2)


def test_forked_loader_workers_do_not_hide_the_death_of_their_rank(tmp_path: Path) -> None:
    """They have inherited its end of every connection; a peer must notice all the same."""
    mark = tmp_path / "killed at"
    program = LOADER.replace(
        'print("read everything", flush=True)',
        f"""
if hvd.rank() == 1:
    open({str(mark)!r}, "w").write(repr(time.time()))
    {KILL}
try:
    hvd.allreduce(torch.ones(3), name="waits for rank 1")
except hvd.HorovodInternalError as error:
    print(f"noticed at {{time.time()}}: {{error}}", flush=True)
    raise
""",
    )
    done, ranks = _run(tmp_path, "shm", program, size=2)
    noticed = re.search(r"noticed at ([\d.]+): rank 1 died", done.stdout)
    assert noticed, (done.stdout, done.stderr)
    assert float(noticed[1]) - float(mark.read_text()) < 1.0
    _check_report(done, 137, "killed by signal 9 (SIGKILL)", None, size=2)
    _check_nothing_is_left(ranks, size=2)


def test_a_caught_failure_leaves_no_memory_of_the_mpi(tmp_path: Path) -> None:
    """Ranks that outlive a broken job do not finalise MPI, and may well end with status 0."""
    began = time.time()
    body, loop = NUMPY.replace("ACT", "runtime.engine.transport.allreduce = None").split("for step", 1)
    lines = [
        "try:",
        *(f"    {line}" for line in f"for step{loop}".splitlines()),
        "except hvd.HorovodInternalError:",
    ]
    program = f"from hvdp._core.runtime import runtime\n{body}\n" + "\n".join([*lines, "    pass", ""])
    done, ranks = _run(tmp_path, "mpi", program, size=2)
    after = set(Path("/dev/shm").iterdir())
    remove_files(began)
    assert done.status == 0, done.stderr
    _check_nothing_is_left(ranks, size=2)
    assert after - set(Path("/dev/shm").iterdir()) == set(), "memory that no process uses was left"
