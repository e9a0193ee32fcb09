"""The control plane's decisions, without sockets or threads."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdp._core.coordinator import Coordinator, Submission, Verdict
from hvdp._core.ops import Kind, Signature

SUM = Signature(Kind.ALLREDUCE, "a", dtype="float32", shape=(3,), op="Sum")


def _submit(coordinator: Coordinator, signatures: dict[int, Signature]) -> Verdict:
    """One submission a rank, in this order; the verdict, which only the last one brings."""
    *first, last = signatures.items()
    for rank, signature in first:
        assert coordinator.submit(rank, Submission(signature)) == []
    (verdict,) = coordinator.submit(last[0], Submission(last[1]))
    return verdict


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_rank_completes_a_name_whatever_the_order(order: tuple[int, ...]) -> None:
    verdict = _submit(Coordinator(3, 10), dict.fromkeys(order, SUM))
    assert verdict.members == (0, 1, 2)
    assert verdict.signature == SUM
    assert not verdict.error
    assert (verdict.number, verdict.new) == (0, True)


@given(st.integers(1, 4), st.integers(1, 6), st.randoms())
def test_every_name_is_decided_once_and_in_the_order_of_completion(size: int, names: int, random) -> None:
    coordinator = Coordinator(size, 100)
    todo = [(rank, SUM._replace(name=str(name))) for rank in range(size) for name in range(names)]
    random.shuffle(todo)
    counts: dict[str, int] = {}
    for rank, signature in todo:
        counts[signature.name] = counts.get(signature.name, 0) + 1
        verdicts = coordinator.submit(rank, Submission(signature))
        assert [v.signature.name for v in verdicts] == (
            [signature.name] if counts[signature.name] == size else []
        )


@pytest.mark.parametrize("early", [True, False])
def test_tensors_that_some_ranks_alone_have_in_a_group_are_refused(early: bool) -> None:
    coordinator = Coordinator(3, 10)
    short, long = (
        [SUM._replace(name=f"a.{index}", group_size=size) for index in range(size)] for size in (1, 3)
    )
    for signature in long if early else long[:1]:
        assert coordinator.submit(1, Submission(signature)) == []
    assert coordinator.submit(0, Submission(short[0])) == []
    verdicts = coordinator.submit(2, Submission(long[0]))
    for rank, signature in ((1, long[1]), (1, long[2]), (2, long[1]), (2, long[2])):
        if rank == 2 or not early:
            verdicts += coordinator.submit(rank, Submission(signature))
    told = sorted((rank, verdict.signature.name) for verdict in verdicts for rank in verdict.members)
    assert told == [(rank, f"a.{i}") for rank in range(3) for i in range(3 if rank else 1)]
    assert all("group_size is 1 on rank 0, 3 on ranks 1, 2" in verdict.error for verdict in verdicts)
    assert not _submit(coordinator, dict.fromkeys((0, 1, 2), long[2])).error


def test_a_signature_keeps_its_number() -> None:
    coordinator = Coordinator(2, 2)
    seen = [_submit(coordinator, dict.fromkeys((0, 1), SUM)) for _ in range(3)]
    assert [(v.number, v.new) for v in seen] == [(0, True), (0, False), (0, False)]
    assert coordinator.signature(0) == SUM
    other = SUM._replace(shape=(4,))
    assert _submit(coordinator, {1: other, 0: other}).number == 1


def test_beyond_the_capacity_there_are_no_numbers_but_all_still_works() -> None:
    coordinator = Coordinator(2, 1)
    for turn in range(2):
        for name, number in (("a", 0), ("b", -1), ("c", -1)):
            verdict = _submit(coordinator, dict.fromkeys((1, 0), SUM._replace(name=name)))
            assert (verdict.number, verdict.new, verdict.error) == (number, number == 0 and not turn, "")


def test_made_up_names_take_no_number() -> None:
    verdict = _submit(Coordinator(2, 10), dict.fromkeys((0, 1), SUM._replace(once=True)))
    assert (verdict.number, verdict.new) == (-1, False)


def test_extras_come_in_the_order_of_the_ranks() -> None:
    coordinator = Coordinator(3, 10)
    gather = Signature(Kind.ALLGATHER, "g", dtype="int64", shape=(2,))
    assert coordinator.submit(2, Submission(gather, (20,))) == []
    assert coordinator.submit(0, Submission(gather, (0,))) == []
    (verdict,) = coordinator.submit(1, Submission(gather, (10,)))
    assert verdict.extras == ((0,), (10,), (20,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float64"}, "dtype is float32 on ranks 0, 2, float64 on rank 1"),
        ({"shape": (3, 1)}, "shape is (3,) on ranks 0, 2, (3, 1) on rank 1"),
        ({"op": "Max"}, "op is Sum on ranks 0, 2, Max on rank 1"),
        ({"kind": Kind.BROADCAST}, "kind is allreduce on ranks 0, 2, broadcast on rank 1"),
        ({"root_rank": 5}, "root_rank is -1 on ranks 0, 2, 5 on rank 1"),
        ({"prescale_factor": 0.5}, "prescale_factor is 1.0 on ranks 0, 2, 0.5 on rank 1"),
        (
            {"dtype": "int8", "op": "Min"},
            "dtype is float32 on ranks 0, 2, int8 on rank 1; op is Sum on ranks 0, 2, Min on rank 1",
        ),
    ],
)
def test_a_mismatch_tells_every_ranks_value(change: dict[str, object], words: str) -> None:
    coordinator = Coordinator(3, 10)
    verdict = _submit(coordinator, {1: SUM._replace(**change), 2: SUM, 0: SUM})
    assert f"the ranks disagree about allreduce 'a': {words}. " in verdict.error
    assert verdict.members == (0, 1, 2)
    assert not verdict.invalid
    assert verdict.gone == -1
    assert not _submit(coordinator, dict.fromkeys(range(3), SUM)).error


def test_three_values_and_many_ranks_are_told() -> None:
    error = _submit(Coordinator(3, 1), {r: SUM._replace(shape=(r,)) for r in range(3)}).error
    assert "shape is (0,) on rank 0, (1,) on rank 1, (2,) on rank 2" in error
    error = _submit(Coordinator(20, 1), {r: SUM._replace(shape=(r == 19,)) for r in range(20)}).error
    assert "on ranks 0, 1, 2, 3, 4, 5, 6, 7, ..." in error
    assert "on rank 19" in error


def test_one_ranks_fault_is_told_to_all() -> None:
    coordinator = Coordinator(3, 10)
    assert coordinator.submit(2, Submission(SUM, error="no such root")) == []
    assert coordinator.submit(0, Submission(SUM._replace(shape=(9,)))) == []
    (verdict,) = coordinator.submit(1, Submission(SUM))
    assert verdict.invalid
    assert verdict.error == "rank 2: no such root"
    assert verdict.members == (0, 1, 2)


def test_a_rank_that_leaves_fails_what_waits_for_it_and_what_comes_later() -> None:
    coordinator = Coordinator(3, 10)
    other = SUM._replace(name="b")
    assert coordinator.submit(0, Submission(SUM)) == []
    assert coordinator.submit(1, Submission(SUM)) == []
    assert coordinator.submit(2, Submission(other)) == []
    verdicts = {v.signature.name: v for v in coordinator.leave(2, "exited")}
    assert verdicts["a"].members == (0, 1)
    assert verdicts["a"].gone == 2
    assert verdicts["a"].error == "rank 2 exited before it took part in allreduce 'a'"
    assert verdicts["b"].members == ()
    (late,) = coordinator.submit(1, Submission(other))
    assert (late.members, late.gone) == ((1,), 2)


def test_process_sets_have_members_and_an_order_of_their_own() -> None:
    coordinator = Coordinator(4, 10)
    add = Signature(Kind.ADD_PROCESS_SET, "set", shape=(1, 3), once=True)
    number = _submit(coordinator, dict.fromkeys(range(4), add)).extras[0][0]
    assert number == 1
    within = SUM._replace(process_set=number)
    assert _submit(coordinator, {3: within, 1: within}).members == (1, 3)
    assert coordinator.submit(1, Submission(within)) == []
    assert coordinator.submit(0, Submission(SUM._replace(name="b"))) == []
    verdicts = coordinator.leave(0, "exited")
    assert [v.signature.name for v in verdicts] == ["b"], "the set without rank 0 goes on"
    (verdict,) = coordinator.submit(3, Submission(within))
    assert not verdict.error


def test_stalls_name_who_is_missing() -> None:
    now = [0.0]
    coordinator = Coordinator(3, 10, clock=lambda: now[0])
    coordinator.submit(1, Submission(SUM))
    now[0] = 10.0
    coordinator.submit(2, Submission(SUM._replace(name="b")))
    now[0] = 12.0
    (stall,) = coordinator.stalls(5.0)
    assert (stall.signature, stall.present, stall.missing, stall.seconds) == (SUM, (1,), (0, 2), 12.0)
    assert [s.signature.name for s in coordinator.stalls(1.0)] == ["a", "b"]
    assert coordinator.stalls(20.0) == []
