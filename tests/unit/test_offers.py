"""Agreement in shared memory: taken, withdrawn in time, withdrawn too late, and mixed with messages."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import numpy as np
import pytest

import hvdp as hvd
from hvdp._core.control import ControlPlane
from hvdp._core.offers import LINE_WORDS, Offers
from hvdp.testing import World, worlds

several = pytest.mark.parametrize("world", worlds(shm=(2, 3)), ids=str)


def test_offers_are_complete_when_all_ranks_make_the_same_one() -> None:
    words = memoryview(bytearray(8 * LINE_WORDS * 3)).cast("Q")
    root, first, second = (Offers(words, rank) for rank in range(3))
    wanted = root.await_all(5, [7, 9])
    assert not root.complete(wanted)
    assert first.offer(5, 7) == 1
    assert not root.complete(wanted)
    for number, heard in ((4, 9), (5, 8)):
        second.offer(number, heard)
        assert not root.complete(wanted), "another operation, or a word still under way"
    second.offer(5, 9)
    assert root.complete(wanted)
    second.withdraw()
    assert not root.complete(wanted)
    assert second.offer(5, 9) == 1
    root.agree()
    assert first.agreements == second.agreements == 1
    assert not root.complete(root.await_all(5, [7, 9])), "the offers were for the first agreement"


def _control() -> tuple[ControlPlane, Counter[bool]]:
    """This rank's control plane, and how often it agreed at once or not."""
    from hvdp._core.runtime import runtime

    hvd.init()
    engine = runtime.require("a test")
    control = engine._control
    engine._spin = 0.02  # several time slices: there may be more ranks than idle cores
    outcomes: Counter[bool] = Counter()
    agree_at_once = control.agree_at_once

    def counted(*args) -> bool:
        agreed = agree_at_once(*args)
        outcomes[agreed] += 1
        return agreed

    control.agree_at_once = counted
    return control, outcomes


def _sum(name: str, process_set: hvd.ProcessSet | None = None) -> None:
    process_set = process_set or hvd.global_process_set
    ranks = process_set.ranks
    assert ranks is not None
    found = hvd.allreduce(np.full(5, hvd.rank() + 1.0), op=hvd.Sum, name=name, process_set=process_set)
    assert found.tolist() == [sum(ranks) + len(ranks)] * 5


def _one_after_the_other() -> int:
    """How often, in as many calls as it takes: on a machine at work ranks seldom come together."""
    _, outcomes = _control()
    for _ in range(60):
        for _ in range(50):
            _sum("again")
        if min(hvd.allgather_object(outcomes[True])):
            break
    return outcomes[True]


@several
def test_calls_made_together_agree_without_a_message(world: World) -> None:
    assert all(count > 0 for count in world.run(_one_after_the_other))


def _withdrawn(too_late: bool) -> bool:
    """Rank 1 gives up at once, or just after rank 0 has agreed; with another rank at it already."""
    control, _ = _control()
    for _ in range(3):
        _sum("known")
    offers = control._shared_offers()
    assert offers is not None
    before = offers.agreements
    hvd.barrier()
    if hvd.rank() != 1:
        late = time.monotonic() + 2.0
        control._distracted = lambda _: bool(control._words.poll(0)) or time.monotonic() > late
    else:
        withdraw = offers.withdraw

        def withdraw_at_last() -> None:
            while too_late and offers.agreements == before:
                time.sleep(0)
            withdraw()

        offers.withdraw = withdraw_at_last
        control._distracted = lambda until: True
    control._offers_to_skip = 0
    if hvd.rank() == 0 and not too_late:
        time.sleep(0.5)
    _sum("known")
    agreed = offers.agreements > before
    hvd.allreduce_async(np.ones(1), name="other").wait()
    for _ in range(3):
        _sum("known")
    return agreed


@several
def test_an_offer_withdrawn_in_time_is_a_submission(world: World) -> None:
    assert not any(world.run(_withdrawn, False))


@several
def test_an_offer_withdrawn_too_late_is_answered_with_the_verdict(world: World) -> None:
    assert all(world.run(_withdrawn, True))


def _mixed(seconds: float) -> Counter[bool]:
    """Calls of all kinds at random moments, while another thread has its own."""
    _, outcomes = _control()
    rank, size = hvd.rank(), hvd.size()
    pairs = [hvd.add_process_set([i, (i + 1) % size]) for i in range(size if size > 2 else 1)]
    stop = threading.Event()
    faults: list[BaseException] = []

    def work() -> None:
        order = random.Random(rank)
        turn = 0
        try:
            while True:
                names = [f"async.{turn % 7}.{i}" for i in range(4)]
                order.shuffle(names)
                handles = [hvd.allreduce_async(np.full(3, 1.0), op=hvd.Sum, name=name) for name in names]
                for handle in handles:
                    assert handle.wait().tolist() == [size] * 3
                turn += 1
                time.sleep(order.random() * 0.03)
                # The last turn is the same one everywhere.
                if hvd.allreduce(np.array([float(stop.is_set())]), op=hvd.Max, name="stop")[0]:
                    return
        except BaseException as fault:  # noqa: BLE001 - handed to the main thread
            faults.append(fault)

    thread = threading.Thread(target=work)
    alike, own = random.Random(1), random.Random(rank)
    until = time.monotonic() + seconds
    steps = 0
    thread.start()
    more = True
    while more and not faults:
        for _ in range(20):
            if own.random() < 0.3:
                time.sleep(own.random() * 0.001)
            _sum(f"sync.{alike.randrange(3)}")
            pair = alike.choice(pairs)
            if rank in pair.ranks:
                _sum("pair", pair)
            if alike.random() < 0.2:
                hvd.barrier()
        steps += 1
        more = hvd.broadcast(np.array([time.monotonic() < until]), 0, name="more")[0]
    stop.set()
    thread.join()
    if faults:
        raise faults[0]
    return outcomes


@several
def test_offers_and_messages_keep_one_order(world: World) -> None:
    for outcomes in world.run(_mixed, 4.0):
        assert outcomes[False] > 0, outcomes
        # With more ranks than cores they hardly ever come together.
        assert outcomes[True] > 0 or world.size > 2, outcomes
