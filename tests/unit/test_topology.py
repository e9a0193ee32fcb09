"""Where a rank stands, also where hosts run different numbers of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdp._core.topology import Place, Topology
from hvdp.errors import RendezvousError


def _table(hosts: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    tops = [Topology(rank, hosts) for rank in range(len(hosts))]
    return [(t.local_rank, t.local_size, t.cross_rank, t.cross_size) for t in tops]


def test_alone() -> None:
    assert _table((0,)) == [(0, 1, 0, 1)]
    assert Topology(0, (0,)).is_homogeneous


def test_two_hosts_of_two() -> None:
    assert _table((0, 0, 1, 1)) == [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]
    assert Topology(2, (0, 0, 1, 1)).is_homogeneous
    assert Topology(2, (0, 0, 1, 1)).local_ranks == (2, 3)


def test_ranks_dealt_out_in_turns() -> None:
    assert _table((0, 1, 0, 1)) == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]
    assert Topology(0, (0, 1, 0, 1)).local_ranks == (0, 2)


def test_hosts_of_different_sizes() -> None:
    hosts = (0, 0, 0, 1, 2, 2)
    assert _table(hosts) == [
        (0, 3, 0, 3),
        (1, 3, 0, 2),
        (2, 3, 0, 1),
        (0, 1, 1, 3),
        (0, 2, 2, 3),
        (1, 2, 1, 2),
    ]
    assert not Topology(0, hosts).is_homogeneous


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_places_are_distinct_and_complete(raw: list[int]) -> None:
    numbers: dict[int, int] = {}
    hosts = tuple(numbers.setdefault(host, len(numbers)) for host in raw)
    tops = [Topology(rank, hosts) for rank in range(len(hosts))]
    assert len({(hosts[t.rank], t.local_rank) for t in tops}) == len(tops)
    assert len({(t.local_rank, t.cross_rank) for t in tops}) == len(tops)
    for t in tops:
        assert 0 <= t.local_rank < t.local_size == hosts.count(hosts[t.rank])
        assert 0 <= t.cross_rank < t.cross_size == sum(1 for o in tops if o.local_rank == t.local_rank)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_an_impossible_place_is_refused(rank: int, size: int) -> None:
    with pytest.raises(RendezvousError, match=f"mpiexec gave this process rank {rank} of {size}"):
        Place(rank, size, "mpiexec", "unix:x")
