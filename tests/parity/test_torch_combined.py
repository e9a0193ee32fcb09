"""Options, habits and changes together: each on 2 and 3 ranks as on one process with the joined batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

import hvdp.torch as hvd
from hvdp.testing import World, worlds

from . import changes, combinations, embeddings

SMALL_BUCKETS = {"HVDP_FUSION_THRESHOLD": "400"}


def _run_all(cases: list[Callable[[], None]]) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    hvd.init()
    for case in cases:
        case()


@pytest.mark.parametrize("world", worlds(shm=(2, 3)), ids=str)
def test_many_ranks_train_as_one_process_does(world: World) -> None:
    cases = [*combinations.CASES, *embeddings.CASES, *changes.CASES]
    world.run(_run_all, cases, env=SMALL_BUCKETS, timeout=100)
