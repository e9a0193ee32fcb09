"""The first failing rank decides the status and is reported once, last."""

from __future__ import annotations

import os
import signal

import pytest


@pytest.mark.parametrize(
    ("act", "status", "report"),
    [
        ("sys.exit(3)", 3, "exited with status 3"),
        ("os._exit(7)", 7, "exited with status 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by signal 9 (SIGKILL)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by signal 11 (SIGSEGV)"),
    ],
)
def test_status_and_report(start, how, act: str, status: int, report: str) -> None:
    running = start(f"if rank == 1: {act}", flags=how)
    assert running.end() == status
    assert running.err[-1] == f"hvdprun: rank 1 of 2 failed: {report}"
    assert running.stderr.count(b"failed:") == 1


def test_traceback_comes_once_and_last(start, how) -> None:
    body = """
print("before", file=sys.stderr, flush=True)
if rank == 1:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("outer") from error
"""
    running = start(body, flags=how)
    assert running.end() == 1
    assert running.err[-1] == "hvdprun: rank 1 of 2 failed: exited with status 1"
    assert running.err[-2] == "[1]<stderr>:ValueError: outer"
    assert running.stderr.count(b"ValueError: outer") == running.stderr.count(b"KeyError: 'inner'") == 1
    first = next(i for i, line in enumerate(running.err) if "Traceback" in line)
    assert all(line.startswith("[1]<stderr>:") for line in running.err[first:-1])


def test_other_ranks_get_a_grace_period_and_then_end(start, how) -> None:
    body = "if rank == 1: sys.exit(4)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nblocked()"
    running = start(body, flags=how)
    assert running.end() == 4
    assert 4 < running.seconds < 10


def test_the_accused_rank_is_blamed_and_consequences_take_a_line(start, how) -> None:
    # Rank 0 sees rank 1's end before the launcher can, as a peer with an open socket does.
    body = """
if rank == 0:
    os.write(place.supervisor_fd, b"failed 1\\n")
    open(sys.argv[0] + ".told", "w").close()
    raise HorovodInternalError("rank 1 has gone")
while not os.path.exists(sys.argv[0] + ".told"): time.sleep(0.01)
if rank == 1:
    time.sleep(0.5)
    raise ValueError("mine")
if rank == 2:
    raise LookupError("another story")
"""
    running = start(body, np=3, flags=how)
    assert running.end() == 1
    assert "[0]<stderr>:stopped by the failure of rank 1" in running.err
    assert b"HorovodInternalError" not in running.stderr
    assert running.err[-2:] == [
        "[1]<stderr>:ValueError: mine",
        "hvdprun: rank 1 of 3 failed: exited with status 1",
    ]
    assert running.err.index("[2]<stderr>:LookupError: another story") < len(running.err) - 4


def test_a_process_that_ends_slowly_has_its_last_words_last(start, how) -> None:
    # As TensorFlow's may, long after its traceback.
    body = """
import traceback
if rank == 0:
    os.write(place.supervisor_fd, b"failed 1\\n")
try:
    raise ValueError("mine") if rank == 1 else HorovodInternalError("rank 1 raised ValueError")
except Exception:
    traceback.print_exc()
time.sleep(2.8)
os._exit(1)
"""
    running = start(body, flags=how)
    assert running.end() == 1
    assert running.err[0] == "[0]<stderr>:stopped by the failure of rank 1"
    assert running.stderr.count(b"Traceback") == 1
    assert running.err[-2:] == [
        "[1]<stderr>:ValueError: mine",
        "hvdprun: rank 1 of 2 failed: exited with status 1",
    ]


def test_a_rank_that_left_early_with_zero_is_not_blamed(start) -> None:
    body = """
if rank == 0:
    os.write(place.supervisor_fd, b"failed 1\\n")
    raise HorovodInternalError("rank 1 has left")
"""
    running = start(body)
    assert running.end() == 1
    assert running.err[-1] == "hvdprun: rank 0 of 2 failed: exited with status 1"
    assert "HorovodInternalError: rank 1 has left" in running.err[-2]


def test_a_handled_traceback_is_streamed_in_order(start) -> None:
    body = """
import traceback
try: 1 / 0
except ZeroDivisionError: traceback.print_exc()
print("after", file=sys.stderr, flush=True)
while not os.path.exists(sys.argv[0] + ".go"): time.sleep(0.01)
"""
    running = start(body, np=1)
    with running._changed:
        assert running._changed.wait_for(lambda: b"after" in running.stderr, timeout=10)
    open(running.process.args[-1] + ".go", "w").close()
    assert running.end() == 0
    assert running.err[-2:] == ["[0]<stderr>:ZeroDivisionError: division by zero", "[0]<stderr>:after"]


def test_grandchildren_end_with_a_failed_job(start, how) -> None:
    body = """
child = subprocess.Popen(["sleep", "300"])
print("child", child.pid, flush=True)
if rank == 1: sys.exit(5)
blocked()
"""
    running = start(body, flags=how)
    assert running.end() == 5
    for line in running.out:
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[-1]), 0)


def test_grandchildren_end_with_a_good_job(start, how) -> None:
    running = start("print(subprocess.Popen(['sleep', '300']).pid)", flags=how)
    assert running.end() == 0
    assert running.seconds < 8
    for line in running.out:
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split(":")[-1]), 0)


def test_mpi_abort_passes_on_its_status(start, mpiexec) -> None:
    pytest.importorskip("mpi4py")
    body = "from mpi4py import MPI\nif rank == 1: MPI.COMM_WORLD.Abort(5)\nMPI.COMM_WORLD.Barrier()"
    running = start(body, flags=("--mpi",))
    assert running.end() == 5
    assert running.err[-1].startswith("hvdprun: ")


def test_mpi_peers_in_a_collective_end_too(start, mpiexec) -> None:
    pytest.importorskip("mpi4py")
    body = (
        "from mpi4py import MPI\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nMPI.COMM_WORLD.Barrier()"
    )
    running = start(body, flags=("--mpi",))
    assert running.end() == 128 + signal.SIGKILL
    assert running.seconds < 10
