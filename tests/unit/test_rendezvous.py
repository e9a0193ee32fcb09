"""How ranks find each other, with everything that can be wrong about a newcomer."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from hvdp._core import rendezvous
from hvdp._core.rendezvous import Listener, Meeting, meet
from hvdp._core.topology import Place, Topology
from hvdp._core.wire import Link
from hvdp.errors import HvdpError, RendezvousError, TransportError

SECRET = b"s" * 32


def _agree(topology: Topology, facts: list[dict[str, Any]]) -> str:
    return f"{topology.size} ranks: {[fact['who'] for fact in facts]}"


class Job:
    """Ranks as threads of this process; every `join` returns a future."""

    def __init__(self, size: int, scheme: str) -> None:
        self.size = size
        self.pool = ThreadPoolExecutor(16)
        self.listener: Listener | None = None
        self.address = f"unix:hvdp-unit-{uuid.uuid4().hex}"
        if scheme == "tcp":
            self.listener = Listener("tcp:0")
            self.address = f"tcp:127.0.0.1:{self.listener.port}"
        self.links: list[Link] = []

    def join(
        self,
        rank: int,
        secret: bytes = SECRET,
        size: int = 0,
        timeout: float = 20.0,
        agree: Callable[..., str] = _agree,
        generation: int = 0,
    ) -> Future[Meeting]:
        place = Place(rank, size or self.size, "a test", self.address, secret)
        listener = self.listener if rank == 0 else None
        return self.pool.submit(self._meet, place, timeout, agree, generation, listener)

    def _meet(self, place: Place, timeout: float, agree: Any, generation: int, listener: Any) -> Meeting:
        meeting = meet(place, {"who": f"r{place.rank}"}, agree, timeout, generation, listener)
        self.links += meeting.links.values()
        return meeting

    def connect(self) -> socket.socket:
        """As a process that is no rank, once rank 0 listens."""
        while True:
            if self.address.startswith("tcp:"):
                return socket.create_connection(("127.0.0.1", int(self.address.rpartition(":")[2])))
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect("\0" + self.address.partition(":")[2] + "#0")
                return sock
            except ConnectionRefusedError:
                sock.close()
                time.sleep(0.01)


@pytest.fixture(params=["unix", "tcp"])
def job(request: pytest.FixtureRequest):
    jobs = []

    def make(size: int) -> Job:
        jobs.append(Job(size, request.param))
        return jobs[-1]

    yield make
    for made in jobs:
        made.pool.shutdown()
        for link in made.links:
            link.sock.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_ranks_meet_in_any_order(job, order: tuple[int, ...]) -> None:
    three = job(3)
    futures = {rank: three.join(rank) for rank in order}
    meetings = [futures[rank].result(20) for rank in range(3)]
    assert [m.topology for m in meetings] == [Topology(rank, (0, 0, 0)) for rank in range(3)]
    assert {m.transport for m in meetings} == {"3 ranks: ['r0', 'r1', 'r2']"}
    assert [sorted(m.links) for m in meetings] == [[1, 2], [0], [0]]
    for rank in (1, 2):
        meetings[rank].links[0].send(f"from {rank}".encode())
        assert meetings[0].links[rank].receive_one(time.monotonic() + 5) == f"from {rank}".encode()


def test_one_rank_needs_nobody() -> None:
    meeting = meet(Place(0, 1, "nobody", ""), {"who": "me"}, _agree, 0.0, 0)
    assert meeting == Meeting(Topology(0, (0,)), {}, "1 ranks: ['me']")


def test_a_wrong_secret_is_turned_away_and_the_job_goes_on(job) -> None:
    two = job(2)
    leader = two.join(0)
    with pytest.raises(RendezvousError, match=r"rank 1 reached rank 0 .* but was turned away"):
        two.join(1, secret=b"x" * 32).result(20)
    good = two.join(1)
    assert leader.result(20).topology.size == good.result(20).topology.size == 2


def test_a_rank_that_comes_twice_ends_the_start_on_all(job) -> None:
    three = job(3)
    leader = three.join(0)
    first = three.join(1)
    again = three.join(1)
    for future in (leader, first, again):
        with pytest.raises(
            RendezvousError, match=r"came as rank 1 of 3 to a job of 3 ranks that has ranks \[0, 1\]"
        ):
            future.result(20)


def test_another_size_ends_the_start_on_all(job) -> None:
    two = job(2)
    leader, stray = two.join(0), two.join(1, size=3)
    for future in (leader, stray):
        with pytest.raises(RendezvousError, match="came as rank 1 of 3 to a job of 2 ranks"):
            future.result(20)


def test_missing_ranks_are_named(job) -> None:
    four = job(4)
    leader = four.join(0, timeout=0.5)
    present = four.join(2)
    for future in (leader, present):
        with pytest.raises(
            RendezvousError, match=r"waited in vain for ranks \[1, 3\] of 4 \(started by a test\)"
        ):
            future.result(20)


def test_a_missing_leader_is_told(job) -> None:
    two = job(2)
    if two.listener is not None:
        two.listener.close()
    with pytest.raises(RendezvousError, match=r"rank 1 did not find rank 0 at .* in time"):
        two.join(1, timeout=0.3).result(20)


@pytest.mark.parametrize("kind", [TransportError, RendezvousError])
def test_what_rank_0_refuses_all_ranks_raise(job, kind: type[HvdpError]) -> None:
    def refuse(topology: Topology, facts: list[dict[str, Any]]) -> str:
        raise kind("these do not fit")

    three = job(3)
    for future in [three.join(rank, agree=refuse) for rank in range(3)]:
        with pytest.raises(kind, match=r"^these do not fit$"):
            future.result(20)


@pytest.mark.parametrize("says", [b"", b"\x04\0\0\0what", b"\xff\xff\xff\x7f", b"GET / HTTP/1.1\r\n\r\n"])
def test_strangers_do_not_hold_up_the_job(job, says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_STRANGER_SECONDS", 0.2)
    two = job(2)
    leader = two.join(0)
    strangers = [two.connect() for _ in range(3)]
    for stranger in strangers:
        stranger.sendall(says)
    rank = two.join(1)
    assert leader.result(5).topology.size == rank.result(5).topology.size == 2
    for stranger in strangers:
        stranger.close()


def test_two_starts_of_one_job_do_not_mix() -> None:
    two = Job(2, "unix")
    later = two.join(1, generation=1)
    first = [two.join(rank, generation=0) for rank in range(2)]
    assert [f.result(20).topology.rank for f in first] == [0, 1]
    assert not later.done()
    assert two.join(0, generation=1).result(20).topology.rank == 0
    assert later.result(20).topology.rank == 1
    two.pool.shutdown()
    for link in two.links:
        link.sock.close()


def test_an_address_in_use_is_told() -> None:
    name = f"unix:hvdp-unit-{uuid.uuid4().hex}"
    listener = Listener(name)
    with pytest.raises(RendezvousError, match="Is another job using this address"):
        Listener(name)
    listener.close()
