"""Ranks that leave at a bad moment: whoever was agreed with is served, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdp
from hvdp._core import rendezvous
from hvdp.errors import HorovodInternalError, InvalidArgumentError, RendezvousError
from hvdp.launch.environments import detect
from hvdp.testing import Completed, World, run_script

ONES = np.ones(4, np.float32)


def _launched(program: str, folder: Path, *flags: str, env: Mapping[str, str] | None = None) -> Completed:
    """A program whose processes end as programs do, on two ranks."""
    script = folder / "program.py"
    script.write_text(program)
    return run_script(
        [sys.executable, "-m", "hvdp.launch", "-np", "2", *flags, sys.executable, script], env=env
    )


def _engine() -> Any:
    from hvdp._core.runtime import runtime

    return runtime.require("a test")


AT_A_BAD_MOMENT = """
import sys, time
import numpy as np
import hvdp as hvd

hvd.init()
ones = np.ones(4, np.float32)
hvd.allreduce(ones, name="known")
if hvd.rank() == 1:
    time.sleep(0.5)
    hvd.allreduce_async(ones, name="known")
    LEAVE
else:
    print(hvd.allreduce(ones, name="known")[0], flush=True)
    try:
        hvd.allreduce(ones, name="more")
    except hvd.HorovodInternalError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize("flags", [(), ("--mpi",)], ids=["direct", "mpi"])
@pytest.mark.parametrize(
    ("leave", "status", "reason"),
    [
        ("sys.exit(0)", 0, "rank 1 exited"),
        ("hvd.shutdown()", 0, "rank 1 called hvd.shutdown()"),
        ("raise ValueError('no')", 1, "rank 1 raised ValueError: no"),
    ],
)
def test_what_was_agreed_on_before_a_goodbye_is_done(
    leave: str, status: int, reason: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    done = _launched(AT_A_BAD_MOMENT.replace("LEAVE", leave), tmp_path, *flags)
    assert done.status == status, done.stderr
    assert "[0]<stdout>:1.0" in done.stdout
    assert f"{reason} before it took part in allreduce 'more'" in done.stdout
    assert done.seconds < 20


def _leaves_between_verdict_and_goodbye() -> float:
    hvdp.init()
    hvdp.allreduce(ONES, name="known")
    if hvdp.rank() == 1:
        handle = hvdp.allreduce_async(ONES * 3, name="known")
        time.sleep(0.3)
        control = _engine()._control
        goodbye = control.goodbye

        def late(reason: str) -> Any:
            time.sleep(0.5)
            return goodbye(reason)

        control.goodbye = late
        hvdp.shutdown()
        return float(handle.wait()[0])
    time.sleep(0.5)
    return float(hvdp.allreduce(ONES, name="known")[0])


def test_a_goodbye_behind_a_verdict() -> None:
    assert World("shm", 2).run(_leaves_between_verdict_and_goodbye, timeout=20) == [2.0, 2.0]


def _locks_at_the_end() -> str:
    """The background thread is preempted where it has seen the end, the caller where it tells of it."""
    hvdp.init()
    hvdp.allreduce(ONES, name="a")
    engine = _engine()
    if hvdp.rank() == 1:
        time.sleep(1.0)
        control = engine._control
        control.abort(1, "the test says so")
        return ""

    class Slow:
        def __init__(self, lock: Any) -> None:
            self.lock = lock

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *error: object) -> None:
            self.lock.release()
            if threading.current_thread() is engine._thread:
                time.sleep(1.0)

    engine._wheel = Slow(engine._wheel)
    abort = engine._control.abort

    def slow(*args: Any) -> None:
        time.sleep(1.5)
        abort(*args)

    engine._control.abort = slow
    timer = threading.Timer(0.8, engine._wake)
    timer.start()
    with pytest.raises(HorovodInternalError, match="the test says so"):
        hvdp.allreduce(ONES, name="b")
    timer.join()
    return "raised"


def test_locks_are_taken_in_one_order() -> None:
    assert World("shm", 2).run(_locks_at_the_end, timeout=20)[0] == "raised"


def _ring_while_off_the_processor() -> None:
    """A caller that is about to wait; another thread's calls make the engine run its operation."""
    hvdp.init()
    for name in "abc":
        hvdp.allreduce(ONES, name=name)
    if hvdp.rank() == 0:
        first = hvdp.allreduce_async(ONES, name="b")
        time.sleep(0.5)
        for name in "amc":
            hvdp.allreduce(ONES, name=name)
        first.wait()
        return
    control, main, slept = _engine()._control, threading.get_ident(), []
    watch = control.watch

    def late(timeout: float | None) -> bool:
        if timeout is None and threading.get_ident() == main and not slept:
            slept.append(True)
            time.sleep(1.5)
        return bool(watch(timeout))

    def others() -> None:
        time.sleep(1.0)
        first = hvdp.allreduce_async(ONES, name="b")
        time.sleep(0.2)
        hvdp.allreduce_async(ONES, name="c").wait()
        first.wait()

    control.watch = late
    thread = threading.Thread(target=others)
    thread.start()
    hvdp.allreduce(ONES, name="a")
    hvdp.allreduce(ONES, name="m")
    thread.join()
    assert slept


def test_a_ring_is_heard_by_the_caller_that_it_is_for() -> None:
    World("shm", 2).run(_ring_while_off_the_processor, timeout=20)


def _goodbye_while_sending() -> str:
    pair = hvdp.ProcessSet([0, 1])
    hvdp.init(process_sets=[pair])
    hvdp.allreduce(ONES, name="y")
    hvdp.barrier()
    if hvdp.rank() == 1:
        hvdp.allreduce_async(ONES[:0], name="z", process_set=pair)
        time.sleep(1.0)
        # As if it were killed behind its goodbye, without a wait for the answer.
        _engine()._control.goodbye("rank 1 left in a test")
        os._exit(0)
    if hvdp.rank() == 2:
        time.sleep(0.3)
        began = time.monotonic()
        with pytest.raises(HorovodInternalError):
            hvdp.allreduce(ONES, name="y")
        assert time.monotonic() - began < 8
        return "told"
    time.sleep(0.6)
    control = _engine()._control
    flush = control.flush

    def late() -> None:
        if control._verdicts:
            time.sleep(1.0)
        flush()

    control.flush = late
    hvdp.allreduce_async(ONES[:0], name="z", process_set=pair)
    time.sleep(3)
    return "told"


def test_what_is_heard_while_sending_is_told_at_once() -> None:
    with pytest.raises(AssertionError, match="returned 'told'") as caught:
        World("shm", 3).run(_goodbye_while_sending, env={"HVDP_STALL_CHECK_DISABLE": "1"}, timeout=30)
    assert "rank 2: returned 'told'" in str(caught.value)


def _reads_late() -> int:
    """Rank 0 leaves with a megabyte on the way to a rank that gets to reading two seconds later."""
    alone = hvdp.ProcessSet([1])
    hvdp.init(process_sets=[alone])
    hvdp.barrier()
    if hvdp.rank() == 0:
        hvdp.barrier()
        links = _engine()._control._links.values()
        unsent = sum(len(link._out) for link in links)
        hvdp.shutdown()
        return unsent
    control, began = _engine()._control, time.monotonic()
    listen = control.listen

    def late(seconds: float) -> None:
        if time.monotonic() - began > 2:
            listen(seconds)

    control.listen = late
    names = [f"{number}{'n' * 300}" for number in range(3000)]
    handles = [hvdp.allreduce_async(ONES, name=name, process_set=alone) for name in names]
    hvdp.barrier()
    return sum(float(handle.wait()[0]) == 1.0 for handle in handles)


def test_rank_0_may_leave_last_before_a_rank_that_reads_late() -> None:
    unsent, right = World("shm", 2).run(_reads_late, timeout=40)
    assert unsent > 100_000, "the socket took it all: nothing was tested"
    assert right == 3000


IN_A_HANDLER = """
import os, signal, sys, threading, time
import numpy as np
import hvdp as hvd

hvd.init()
ones = np.ones(4, np.float32)

def handler(*_):
    hvd.allreduce(ones, name="in the handler")
    hvd.shutdown()
    sys.exit(0)

if hvd.rank() == 1:
    signal.signal(signal.SIGUSR1, handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    hvd.allreduce(ones, name="a")
else:
    hvd.allreduce(ones, name="in the handler")
    try:
        hvd.allreduce(ones, name="b")
    except hvd.HorovodInternalError as error:
        print(error)
"""


def test_calls_in_a_signal_handler_within_a_call(tmp_path: Path) -> None:
    done = _launched(IN_A_HANDLER, tmp_path)
    assert done.status == 0, done.stderr
    assert "rank 1 called hvd.shutdown() before it took part in allreduce 'b'" in done.stdout


FIRST_INIT_FAILS = """
import os, sys
import hvdp as hvd

os.environ["HVDP_CPU_OPERATIONS"] = "nonsense"
try:
    hvd.init()
except hvd.HvdpError:
    os.environ["HVDP_CPU_OPERATIONS"] = "mpi"
try:
    hvd.init()
except hvd.HvdpError:
    os.environ["HVDP_CPU_OPERATIONS"] = "shm"
else:
    sys.exit("MPI cannot have started: nothing was tested")
hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    sys.exit(0)
try:
    hvd.barrier()
except hvd.HorovodInternalError as error:
    print(error)
"""


def test_a_goodbye_at_exit_though_the_first_init_failed(tmp_path: Path) -> None:
    done = _launched(FIRST_INIT_FAILS, tmp_path)
    assert done.status == 0, done.stderr
    assert "rank 1 exited before it took part in barrier" in done.stdout


FORKS = """
import os, sys
import numpy as np
import hvdp as hvd

hvd.init()
assert hvd.mpi_enabled()
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print(hvd.allreduce(np.ones(3), op=hvd.Sum)[0])
"""


def test_a_forked_child_does_not_end_mpi(tmp_path: Path) -> None:
    done = _launched(FORKS, tmp_path, "--mpi", env={"HVDP_CPU_OPERATIONS": "mpi"})
    assert done.status == 0, done.stderr
    assert "[0]<stdout>:2.0" in done.stdout


def _segment_owner_dies(accepted: bool) -> Any:
    """In a set whose other member has no link to it, while rank 0 is late to tell of the death."""
    pair = hvdp.ProcessSet([1, 2])
    hvdp.init(process_sets=[pair])
    if hvdp.rank() == 0:
        time.sleep(0.3)
        sum(range(4 * 10**7))  # keeps the interpreter, and so the engine, to itself
    if hvdp.rank() == 1:
        from hvdp.transports._memory import SegmentExchange

        def die(*_: object) -> None:
            time.sleep(0.5)
            os._exit(3)

        if accepted:
            socket.send_fds = die  # type: ignore[assignment]
        else:
            SegmentExchange._accept = die  # type: ignore[method-assign, assignment]
    try:
        hvdp.allreduce(ONES, process_set=pair) if hvdp.rank() else hvdp.barrier()
    except HorovodInternalError as error:
        return error.rank
    return "no error"


@pytest.mark.parametrize("accepted", [True, False])
def test_a_death_while_memory_is_handed_over(accepted: bool) -> None:
    with pytest.raises(AssertionError) as caught:
        World("shm", 3).run(_segment_owner_dies, accepted, timeout=30)
    text = str(caught.value)
    assert "rank 0: returned 1" in text
    assert "rank 2: returned 1" in text


def _dies_before_the_welcome() -> str:
    rank = detect(os.environ).rank
    if rank == 1:
        send = rendezvous.Link.send

        def last(self: Any, payload: bytes) -> None:
            send(self, payload)
            if payload[:1] == b"H":
                os._exit(3)

        rendezvous.Link.send = last  # type: ignore[method-assign]
    if rank == 2:
        time.sleep(0.3)
    with pytest.raises(RendezvousError, match="rank 1 died before the job had begun"):
        hvdp.init()
    return "told"


def test_a_death_while_the_ranks_meet() -> None:
    with pytest.raises(AssertionError) as caught:
        World("shm", 3).run(_dies_before_the_welcome, timeout=30)
    assert str(caught.value).count("returned 'told'") == 2


def _timeline_of_a_failed_job(path: str) -> str:
    hvdp.init()
    hvdp.start_timeline(path)
    hvdp.allreduce(ONES, name="a")
    if hvdp.rank() == 1:
        time.sleep(0.5)
        os._exit(3)
    with pytest.raises(HorovodInternalError):
        hvdp.allreduce(ONES, name="b")
    _engine()._thread.join()
    mine = [open(f"{path}.{number}", "w") for number in range(12)]  # noqa: SIM115
    hvdp.stop_timeline()
    with pytest.raises(HorovodInternalError):
        hvdp.start_timeline(path)
    for file in mine:
        file.write("mine")
        file.close()
    return "mine are open"


def test_the_timeline_of_a_failed_job_closes_nobody_elses_file(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="returned 'mine are open'"):
        World("shm", 2).run(_timeline_of_a_failed_job, str(tmp_path / "trace.json"), timeout=30)


def _full_disk(path: str) -> float:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hvdp.init()
    hvdp.allreduce(ONES, name="a")
    hvdp.start_timeline(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    result = sum(float(hvdp.allreduce(ONES, name="a")[0]) for _ in range(100))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return result


def test_a_full_disk_ends_the_timeline_and_not_the_training(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    found = World("shm", 1).run(_full_disk, str(path), timeout=30)
    assert found == [100.0]
    assert len(json.loads(path.read_text())) > 10


def _stale_set() -> None:
    first = hvdp.ProcessSet([0])
    hvdp.init(process_sets=[first])
    assert first.process_set_id == 1
    hvdp.shutdown()
    hvdp.init()
    hvdp.add_process_set([1])
    with pytest.raises(InvalidArgumentError, match="is not known"):
        hvdp.allreduce(ONES, process_set=first)
    hvdp.add_process_set(first)
    if hvdp.rank() == 0:
        hvdp.allreduce(ONES, process_set=first)
    hvdp.barrier()


def test_a_process_set_does_not_outlive_the_job() -> None:
    World("shm", 2).run(_stale_set, timeout=30)


def _matrix() -> None:
    hvdp.init()
    matrix = np.matrix(np.ones((700, 700)))
    assert hvdp.allreduce_(matrix, op=hvdp.Sum) is matrix
    assert type(matrix) is np.matrix
    assert (matrix == hvdp.size()).all()
    rows = np.ones((8, 8))
    hvdp.allreduce_(rows[2:4], op=hvdp.Sum)
    assert rows.sum() == 48 + 16 * hvdp.size()


def test_kinds_of_arrays_in_place() -> None:
    World("shm", 2).run(_matrix, timeout=30)
