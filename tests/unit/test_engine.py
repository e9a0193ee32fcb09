"""The engine's life in real processes: starts, ends, threads and its own use of the processor."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import hvdp as hvd
from hvdp.errors import HorovodInternalError, NotInitializedError
from hvdp.testing import World, worlds

pairs = pytest.mark.parametrize("world", worlds(shm=(2,), mpi=(2,)), ids=str)


def _start_again_and_again() -> None:
    for turn in range(6):
        hvd.init()
        size = hvd.size()
        # Large, so that the first rank to be done has left while others are still at it.
        data = np.full(500_000, float(turn))
        assert (hvd.allreduce(data, op=hvd.Sum) == turn * size).all()
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(NotInitializedError):
            hvd.rank()


def _leave_a_waiting_peer() -> str:
    hvd.init()
    if hvd.rank() == 1:
        handle = hvd.allreduce_async(np.ones(2), name="never")
        hvd.shutdown()
    else:
        handle = hvd.allreduce_async(np.ones(2), name="waits for rank 1")
    with pytest.raises(HorovodInternalError) as caught:
        handle.wait()
    if hvd.is_initialized():
        with pytest.raises(HorovodInternalError):
            hvd.allreduce(np.ones(2))
    return str(caught.value)


@pairs
def test_a_rank_that_leaves_ends_the_calls_that_wait_for_it(world: World) -> None:
    waited, left = world.run(_leave_a_waiting_peer)
    assert "rank 1 called hvd.shutdown()" in waited
    assert left == "rank 1 has shut down hvdp"


@pytest.mark.parametrize("world", worlds(shm=(1, 2, 4), mpi=(3,)), ids=str)
def test_init_works_again_after_shutdown(world: World) -> None:
    world.run(_start_again_and_again)


def _first_call_from_another_thread() -> list[float]:
    found: list[float] = []

    def work() -> None:
        hvd.init()
        found.extend(hvd.allreduce(np.arange(3.0) + hvd.rank(), op=hvd.Sum))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    found.extend(hvd.allgather(np.array([float(hvd.rank())])))
    return found


@pairs
def test_the_first_call_may_come_from_another_thread(world: World) -> None:
    assert world.run(_first_call_from_another_thread) == [[1.0, 3.0, 5.0, 0.0, 1.0]] * 2


def _names_in_any_order() -> None:
    """Three threads, each with names of its own in an order that differs between the ranks."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    faults: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for turn in range(5):
                numbers = list(range(20))
                random.Random(rank * 100 + thread * 10 + turn).shuffle(numbers)
                handles = {
                    n: hvd.allreduce_async(np.full(n + 1, n + rank), op=hvd.Sum, name=f"{thread}.{n}")
                    for n in numbers
                }
                for number, handle in handles.items():
                    wanted = size * number + size * (size - 1) // 2
                    np.testing.assert_array_equal(handle.wait(), np.full(number + 1, wanted))
        except BaseException as fault:  # noqa: BLE001 - handed to the main thread
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


@pytest.mark.parametrize("world", worlds(shm=(2, 4), mpi=(3,)), ids=str)
def test_ranks_may_submit_in_different_orders(world: World) -> None:
    world.run(_names_in_any_order)


def _processor_share(seconds: float) -> float:
    """Of one core, by this process with all its threads, while it waits."""
    began, used = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - used) / (time.perf_counter() - began)


def _idle_then_late() -> tuple[float, float]:
    hvd.init()
    hvd.allreduce(np.ones(1000))
    hvd.barrier()
    idle = _processor_share(3.0)
    hvd.barrier()
    if hvd.rank() == 0:
        time.sleep(5.0)
        return idle, float(hvd.allreduce(np.ones(1000), name="late")[0] - 1)
    began, used = time.perf_counter(), time.process_time()
    hvd.allreduce(np.ones(1000), name="late")
    waited = time.perf_counter() - began
    assert waited > 4.5, f"the late rank was awaited for {waited} s only"
    return idle, (time.process_time() - used) / waited


@pytest.mark.parametrize("world", worlds(shm=(3,), mpi=(2,)), ids=str)
def test_idling_and_waiting_hardly_use_the_processor(world: World) -> None:
    found = world.run(_idle_then_late)
    assert all(idle < 0.01 for idle, _ in found), found
    assert all(waiting < 0.05 for _, waiting in found), found


def _interrupted() -> None:
    """Whoever catches an interrupt may go on: the call it broke is completed behind its back."""
    hvd.init()
    size, began = hvd.size(), time.monotonic()
    if hvd.rank() == 0:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            hvd.allreduce(np.ones(2), op=hvd.Sum, name="interrupted")
        hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="go").wait()
    else:
        hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="go").wait()
        assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="interrupted").tolist() == [size] * 2
    assert hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="after").wait().tolist() == [size] * 2
    assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="after").tolist() == [size] * 2
    assert time.monotonic() - began < 5.0, "the engine had fallen asleep"


@pairs
def test_a_caught_interrupt_does_not_stop_the_engine(world: World) -> None:
    world.run(_interrupted)


def _interrupted_in_an_operation() -> str:
    """Its peer is in the same operation and would wait for ever."""
    hvd.init()
    from hvdp._core.runtime import runtime

    transport = runtime.require("a test").transport
    allreduce = transport.allreduce

    def late(*args: object) -> None:
        time.sleep(1.0)
        allreduce(*args)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if hvd.rank() == 1:
        transport.allreduce = late
        with pytest.raises(HorovodInternalError, match="rank 0") as caught:
            hvd.allreduce(np.ones(100_000), name="interrupted")
    else:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            hvd.allreduce(np.ones(100_000), name="interrupted")
        with pytest.raises(HorovodInternalError, match="rank 0") as caught:
            hvd.allreduce(np.ones(1), name="after")
    return str(caught.value)


@pytest.mark.parametrize("world", worlds(shm=(2,)), ids=str)
def test_an_interrupt_in_an_operation_ends_it_on_all_ranks(world: World) -> None:
    here, there = world.run(_interrupted_in_an_operation, timeout=20)
    assert here == there


def _fork() -> list[str]:
    """A forked child is no rank, and its end is nobody's death."""
    hvd.init()
    said = []
    for _ in range(3):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.write(writer, f"{hvd.is_initialized()}".encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(writer)
        said.append(os.read(reader, 100).decode())
        os.close(reader)
        assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    return said


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pairs
def test_forked_children_are_no_ranks(world: World) -> None:
    assert world.run(_fork) == [["False"] * 3] * 2
