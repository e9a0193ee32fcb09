"""Options, habits and changes together: each on 2 and 3 ranks as on one process with the joined batch."""

from __future__ import annotations

import pytest

from hvdp.testing import World, worlds

from . import changes, combinations, embeddings
from .ways import SMALL_BUCKETS, run_all


@pytest.mark.parametrize("world", worlds(shm=(2, 3)), ids=str)
def test_many_ranks_train_as_one_process_does(world: World) -> None:
    cases = [*combinations.CASES, *embeddings.CASES, *changes.CASES]
    world.run(run_all, cases, env=SMALL_BUCKETS, timeout=100)
