"""Process sets: made in every way, at work at the same time, and refused where they must be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hvdp as hvd
from hvdp.errors import HorovodInternalError, InvalidArgumentError, MismatchError
from hvdp.testing import World, worlds


def _start() -> tuple[int, int]:
    hvd.init()
    return hvd.rank(), hvd.size()


def _refused(match: str, call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """At once, without waiting for anybody."""
    began = time.monotonic()
    with pytest.raises(InvalidArgumentError, match=match):
        call(*args, **options)
    assert time.monotonic() - began < 5


def made_of_lists() -> None:
    rank, size = _start()
    everybody = hvd.add_process_set(range(size))
    assert everybody.process_set_id == 0
    some = hvd.add_process_set([2, 0])
    assert some.ranks == [0, 2]
    assert some.size() == 2
    assert some.included() == (rank in (0, 2))
    again = hvd.ProcessSet([0, 2])
    assert again.process_set_id is None
    assert hvd.add_process_set(again) is again
    assert again.process_set_id == some.process_set_id != 0
    if some.included():
        assert some.rank() == [0, 2].index(rank)
    else:
        _refused(f"rank {rank} is not a member", some.rank)
    assert hvd.global_process_set.ranks == list(range(size))
    assert (hvd.global_process_set.rank(), hvd.global_process_set.size()) == (rank, size)


def every_call_of_members() -> None:
    rank, _ = _start()
    some = hvd.add_process_set([0, 2])
    if rank not in (0, 2):
        return
    mine = np.full(3, rank + 1.0)
    assert hvd.allreduce(mine, process_set=some).tolist() == [2.0] * 3
    assert hvd.allreduce_(mine.copy(), op=hvd.Sum, process_set=some).tolist() == [4.0] * 3
    assert hvd.grouped_allreduce([mine], op=hvd.Max, process_set=some)[0].tolist() == [3.0] * 3
    assert hvd.allgather(mine[: some.rank() + 1], process_set=some).tolist() == [1.0, 3.0, 3.0]
    assert hvd.broadcast(mine, 2, process_set=some).tolist() == [3.0] * 3
    assert hvd.alltoall(np.array([rank, rank + 10]), process_set=some).tolist() == (
        [0, 2] if rank == 0 else [10, 12]
    )
    assert hvd.reducescatter(mine, op=hvd.Sum, process_set=some).tolist() == [4.0] * (2 - some.rank())
    assert hvd.allgather_object(rank, process_set=some) == [0, 2]
    assert hvd.broadcast_object(rank, root_rank=2, process_set=some) == 2
    hvd.barrier(process_set=some)
    _refused(r"one of the ranks \[0, 2\]", hvd.broadcast, mine, 1, process_set=some)


def others_are_refused() -> None:
    rank, _ = _start()
    some = hvd.add_process_set([0, 2])
    if rank not in (0, 2):
        for call, args in (
            (hvd.allreduce, ()),
            (hvd.allreduce_async_, ()),
            (hvd.allgather, ()),
            (hvd.broadcast, (0,)),
            (hvd.alltoall, ()),
            (hvd.reducescatter_async, ()),
        ):
            _refused(f"rank {rank} is not a member", call, np.ones(2), *args, process_set=some)
        _refused("not a member", hvd.grouped_allreduce, [np.ones(2)], process_set=some)
        _refused("not a member", hvd.barrier, process_set=some)
        _refused("not a member", hvd.broadcast_object, 1, process_set=some)
    _refused("call add_process_set on every rank", hvd.allreduce, 1.0, process_set=hvd.ProcessSet([0, 1]))
    _refused("call add_process_set on every rank", hvd.ProcessSet([0, 1]).size)
    for wrong in ([], [0, 0], [-1, 0], [0, 99]):
        _refused("different ranks between 0 and", hvd.add_process_set, wrong)
    for wrong in ([0.5], ["0"], [True], 3):
        _refused("a process set is made of", hvd.ProcessSet, wrong)
    with pytest.raises(MismatchError, match=r"shape is \(0, 1\) on rank 0, \(0, 2\) on rank"):
        hvd.add_process_set([0, 1 if rank == 0 else 2])


def removed() -> None:
    rank, size = _start()
    some = hvd.add_process_set([0, 1])
    same = hvd.add_process_set([1, 0])
    number = some.process_set_id
    if rank == 0:
        handle = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="in flight", process_set=some)
    _refused(f"process set {number} has operations in flight", hvd.remove_process_set, some)
    if rank == 1:
        handle = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="in flight", process_set=some)
    if rank < 2:
        assert handle.wait().tolist() == [2.0, 2.0]
    assert hvd.remove_process_set(some) is True
    assert (some.process_set_id, some.ranks) == (None, None)
    _refused("is not known", hvd.allreduce, 1.0, process_set=some)
    _refused("is not known", hvd.remove_process_set, some)
    _refused("or the set was removed", hvd.allreduce, 1.0, process_set=same)
    assert hvd.remove_process_set(hvd.global_process_set) is False
    anew = hvd.add_process_set([0, 1])
    assert anew.process_set_id not in (number, None)
    if rank < 2:
        assert hvd.allreduce(1.0, op=hvd.Sum, process_set=anew) == 2.0
    assert hvd.allreduce(1.0, op=hvd.Sum) == size


def one_name_in_two_sets() -> None:
    """Each waits for the other: an error on both and on those who come later; the name is free again."""
    rank, size = _start()
    small, large = hvd.add_process_set([0, 1]), hvd.add_process_set([0, 1, 2])
    if rank == 2:
        hvd.barrier()
    if rank < 3:
        with pytest.raises(MismatchError) as caught:
            hvd.allreduce(1.0, name="crossed", process_set=small if rank == 0 else large)
        assert "'crossed' was submitted in different process sets" in str(caught.value)
        assert "by rank 0 in the one of ranks 0, 1" in str(caught.value)
        assert "by rank 1 in the one of ranks 0, 1, 2" in str(caught.value)
    if rank != 2:
        hvd.barrier()
    hvd.barrier()
    assert hvd.allreduce(1.0, op=hvd.Sum, name="crossed") == size
    if rank < 2:
        assert hvd.allreduce(1.0, op=hvd.Sum, name="crossed", process_set=small) == 2


def at_work_at_the_same_time() -> None:
    """A thread for each set that this rank is in, all sets overlapping, small and large tensors."""
    rank, size = _start()
    sets = [[r for r in range(size) if r != left_out] for left_out in range(size)] + [list(range(size))]
    made = [hvd.add_process_set(ranks) for ranks in sets]
    faults: list[BaseException] = []

    def work(number: int) -> None:
        ranks, process_set = sets[number], made[number]
        try:
            for turn in range(15):
                for count in (3, 10_000):
                    mine = np.full(count, (rank + 1.0) * (number + 1) + turn)
                    wanted = sum((r + 1.0) * (number + 1) + turn for r in ranks)
                    found = hvd.allreduce(mine, op=hvd.Sum, name=f"{number}.{count}", process_set=process_set)
                    np.testing.assert_array_equal(found, np.full(count, wanted))
                gathered = hvd.allgather_object((number, rank, turn), f"{number}.object", process_set)
                assert gathered == [(number, r, turn) for r in ranks]
        except BaseException as fault:  # noqa: BLE001 - handed to the main thread
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(n,)) for n, s in enumerate(made) if s.included()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    hvd.barrier()  # rank 0 serves the sets that it is not in, too, as long as it stays


CASES = [
    made_of_lists,
    every_call_of_members,
    others_are_refused,
    removed,
    one_name_in_two_sets,
    at_work_at_the_same_time,
]


def _run_all() -> None:
    for case in CASES:
        case()


@pytest.mark.parametrize("world", worlds(shm=(3, 4), mpi=(3,)), ids=str)
def test_process_sets(world: World) -> None:
    world.run(_run_all, timeout=100)


def _given_to_init() -> list[float]:
    sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])]
    with pytest.raises(InvalidArgumentError, match='a list or "dynamic"'):
        hvd.init(process_sets="static")
    hvd.init(process_sets=sets)
    assert [s.ranks for s in sets] == [[0, 1], [1, 2]]
    mine = [s for s in sets if s.included()]
    found = [float(hvd.allreduce(hvd.rank() + 1.0, op=hvd.Sum, process_set=s)) for s in mine]
    hvd.barrier()
    return found


@pytest.mark.parametrize("world", worlds(shm=(3,), mpi=(3,)), ids=str)
def test_sets_may_be_given_to_init(world: World) -> None:
    assert world.run(_given_to_init) == [[3.0], [3.0, 5.0], [5.0]]


def _made_of_communicators() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    apart = hvd.ProcessSet(world.Split(world.rank % 2, key=-world.rank))
    hvd.init(process_sets=[apart])
    rank, size = hvd.rank(), hvd.size()
    mates = list(range(rank % 2, size, 2))
    assert (apart.ranks, apart.rank()) == (mates, mates.index(rank))
    assert hvd.allreduce(rank + 1.0, op=hvd.Sum, process_set=apart) == sum(r + 1 for r in mates)
    other = hvd.add_process_set(mates if rank % 2 == 0 else [0, 2])
    assert other.process_set_id == apart.process_set_id or rank % 2
    everybody = hvd.add_process_set(hvd.ProcessSet(world))
    assert everybody.process_set_id == 0


def test_sets_may_be_made_of_communicators() -> None:
    World("mpi", 3).run(_made_of_communicators)


def _goes_on(leaver: int, how: str) -> list[str]:
    """One rank leaves; the two others call in a set of theirs, then all together. What that raised."""
    hvd.init()
    some = hvd.add_process_set([r for r in range(3) if r != leaver])
    if hvd.rank() == leaver:
        if how == "shutdown":
            hvd.shutdown()
        return []
    said = []
    try:
        for _ in range(200 if leaver else 100_000):
            assert hvd.allreduce(1.0, op=hvd.Sum, process_set=some) == 2.0
        said.append("went on")
        hvd.allreduce(1.0, name="all")
    except HorovodInternalError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize(("how", "told"), [("shutdown", "called hvd.shutdown()"), ("exit", "exited")])
def test_sets_go_on_without_any_rank_but_the_first(how: str, told: str) -> None:
    world = World("shm", 3)
    others = ["went on", f"rank 2 {told} before it took part in allreduce 'all'"]
    assert world.run(_goes_on, 2, how) == [others, others, []]
    others = [
        f"rank 0 {told}, and no call works without rank 0, not even in process sets that it is not in: "
        "let it leave last, for example after hvd.barrier() on all ranks"
    ]
    assert world.run(_goes_on, 0, how) == [[], others, others]
