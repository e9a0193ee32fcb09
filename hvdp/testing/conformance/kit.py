"""The kit's one function."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np

from hvdp._core.ops import Average, Reduction, Sum
from hvdp._core.process_sets import Group
from hvdp.testing.conformance.expected import DTYPES, PERIOD
from hvdp.testing.conformance.movements import Movements
from hvdp.testing.conformance.reductions import Reductions
from hvdp.transports.base import Transport

__all__ = ["check_transport"]

_FIRST_SUBGROUP = 1000


def check_transport(
    transport: Transport,
    group: Group,
    *,
    thresholds: Sequence[int] = (1 << 15, 1 << 21),
    timeout: float = 60.0,
) -> None:
    """Put a transport through everything its contract promises; collective over `group`.

    Call it on every member, each with its own ready transport, in processes of their own:

        def check() -> None:
            place = detect(os.environ)
            check_transport(MyTransport(...), Group(0, tuple(range(place.size)), place.rank))

        run_ranks(check, 3)

    and for one, two, three and four ranks: the ways of one, of a pair, of an odd number and
    of a power of two often differ. No engine may be running on the transport. It is closed at
    the end; what an operation does after that is left to the transport, for the engine makes none.

    Args:
        thresholds: sizes in bytes at which the transport changes its ways; checked are sizes
            just below, at and above each, and well beyond the largest.
        timeout: seconds that waiting for peers may take in all. It is noticed by a transport
            that waits as it should, calling its `pause`.

    Raises:
        AssertionError: names every case that failed, the ranks and the values. A rank goes on
            after a wrong value, so that its peers get to the end too.
    """
    kit = _Kit(transport, group, thresholds)
    engines_pause = transport.pause
    deadline = time.monotonic() + timeout

    def pause(seconds: float) -> None:
        engines_pause(seconds)
        time.sleep(seconds)
        if time.monotonic() > deadline:
            kit.fault("waited in vain for a peer")
            raise AssertionError(kit.account())

    transport.pause = pause
    try:
        kit.run()
    finally:
        transport.pause = engines_pause
    assert not kit.faults, kit.account()


class _Kit(Movements, Reductions):
    def run(self) -> None:
        self.allgather()
        self.broadcast()
        self.alltoall()
        self.barrier()
        self.allreduce()
        self.scaling()
        self.reducescatter()
        self.averages_do_not_overflow()
        self.rounds_once()
        self.random_floats()
        self.buffers()
        self.mixture()
        self.subgroups()
        self.close()

    def mixture(self) -> None:
        """Small operations of all kinds without a pause between them: staging memory is reused."""
        choice = random.Random(0)
        for number in range(300):
            self.case = f"mixture, operation {number}"
            self.one_of(choice, self.group)

    def one_of(self, choice: random.Random, group: Group) -> None:
        kind, count = choice.randrange(6), choice.randrange(1, 2000)
        if kind == 0:
            self.reduced(group, choice.choice(DTYPES[1:]), count, Reduction(Sum, group.size))
        elif kind == 1:
            self.broadcasted(group, choice.randrange(group.size), count)
        elif kind == 2:
            self.gathered(group, [choice.randrange(count) for _ in group.ranks])
        elif kind == 3:
            self.exchanged(group, [[choice.randrange(count) for _ in group.ranks] for _ in group.ranks])
        elif kind == 4:
            counts = [choice.randrange(count) for _ in group.ranks]
            self.scattered(group, choice.choice(DTYPES[1:]), counts, Reduction(Sum, group.size))
        else:
            self.transport.barrier(group)

    def subgroups(self) -> None:
        """Members of different groups are busy with different things, all members in between."""
        ranks, me = self.group.ranks, self.group.ranks[self.group.index]
        subsets = [ranks[::2], ranks[1::2], ranks[1:], ranks[-1:]]
        choice = random.Random(1)
        choices = [random.Random(number) for number in range(len(subsets))]
        for turn in range(3):
            for number, subset in enumerate(subsets):
                if me in subset:
                    group = Group(_FIRST_SUBGROUP + number, subset, subset.index(me))
                    self.case = f"group of ranks {list(subset)} among {list(ranks)}, turn {turn}"
                    for _ in range(turn + number):
                        self.one_of(choices[number], group)
                    self.broadcasted(group, group.size - 1, 33)
                    self.gathered(group, [5 * i for i in range(group.size)])
                    self.reduced(group, np.dtype(np.float32), PERIOD, Reduction(Average, group.size))
                    self.transport.barrier(group)
            self.case = f"all ranks after their groups, turn {turn}"
            self.one_of(choice, self.group)
        for number, subset in enumerate(subsets):
            if me in subset:
                self.case = f"forget the group of ranks {list(subset)}"
                self.transport.forget(Group(_FIRST_SUBGROUP + number, subset, subset.index(me)))
        self.case = "all ranks after their groups were forgotten"
        self.one_of(choice, self.group)

    def close(self) -> None:
        self.case = "close"
        buffer = self.transport.allocate(self.group, 64)
        buffer.data[...] = 5
        self.transport.barrier(self.group)
        self.transport.close()
        if (buffer.data != 5).any():
            self.fault("a buffer has lost its content")
