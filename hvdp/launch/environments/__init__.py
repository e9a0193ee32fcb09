"""Who started this process, and where the ranks meet: one small class for each launcher.

A new launcher is one file with a class that has `name` and `detect()`, and one line in `LAUNCHERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hvdp._core.topology import Place
from hvdp.launch.environments.horovodrun import Horovodrun
from hvdp.launch.environments.hvdprun import Hvdprun
from hvdp.launch.environments.hydra import Hydra
from hvdp.launch.environments.openmpi import OpenMpi
from hvdp.launch.environments.slurm import Slurm
from hvdp.launch.environments.torchrun import Torchrun

__all__ = ["LAUNCHERS", "Launcher", "detect"]


class Launcher(Protocol):
    """One program that starts the processes of a job."""

    @property
    def name(self) -> str: ...

    def detect(self, env: Mapping[str, str]) -> Place | None:
        """The place it gave this process, or None if it did not start it."""


# The launcher closest to the process comes first: ours may run inside an allocation of another.
LAUNCHERS: tuple[Launcher, ...] = (Hvdprun(), Horovodrun(), Torchrun(), OpenMpi(), Hydra(), Slurm())


def detect(env: Mapping[str, str]) -> Place:
    """This process's place; a world of one if nobody started it.

    Raises:
        RendezvousError: a launcher's variables are there but contradict each other.
    """
    for launcher in LAUNCHERS:
        place = launcher.detect(env)
        if place is not None:
            return place
    return Place(rank=0, size=1, launcher="none", address="")
