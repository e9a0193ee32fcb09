"""The collectives, once for all frameworks; an adapter says how its tensors become arrays.

Every call is collective: all members of the process set make it with the same name, shape,
dtype and options, in any order and from any thread. A disagreement raises MismatchError on
every member, a wrong argument on any rank InvalidArgumentError on every member, and the
death of a rank HorovodInternalError; nothing hangs. Calls without a name are matched by
their order on each rank. See docs/collectives.md.
"""

from hvdp.collectives.movements import Movements
from hvdp.collectives.objects import allgather_object, barrier, broadcast_object, join, poll, synchronize
from hvdp.collectives.reductions import Reductions
from hvdp.collectives.scatters import Scatters
from hvdp.collectives.tensors import Map, T, Tensors, no_compression

__all__ = [
    "Collectives",
    "Map",
    "Tensors",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "join",
    "no_compression",
    "poll",
    "synchronize",
]


class Collectives(Reductions[T], Scatters[T], Movements[T]):
    """The collectives on one framework's tensors.

    Functions ending in `_` work in place and return their argument. Those with `_async`
    return a Handle at once; a tensor worked on in place, gathered or scattered must be left
    alone until its handle completes.
    """
