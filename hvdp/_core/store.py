"""What the mechanism of gradients asks of a framework's tensors."""

from __future__ import annotations

from typing import Protocol

from hvdp._core.arrays import Array

__all__ = ["GradientStore"]


class GradientStore(Protocol):
    """What an adapter does for parameter number `index`; called on the thread of backward or step."""

    def awaits(self, index: int) -> bool:
        """Whether it has a gradient or may get one: it is not frozen."""

    def bind(self, index: int, memory: Array) -> None:
        """From now on `memory` (flat, of the spec's dtype and count) is its place in a bucket."""

    def collect(self, index: int) -> bool:
        """Bring the current gradient into its place, or zeros if there is none; whether there is one."""

    def deliver(self, index: int) -> None:
        """Make the reduced content of its place the gradient."""

    def withdraw(self, index: int) -> None:
        """Leave the parameter without a gradient: no rank that counts has one."""

    def holds_reduced(self, index: int) -> bool:
        """Whether the current gradient is the one delivered last, so that backward has added to it."""

    def lost_reduced(self, or_replaced: bool) -> bool:
        """Whether gradients were delivered of which none is left: dropped, or exchanged for others."""

    def forget_reduced(self) -> None:
        """What has been delivered is used up, or zeroed."""

    def keep_used(self) -> None:
        """What has been delivered is used by a step, and must not be summed up again by the next one."""

    def share_used(self, ranks: int) -> None:
        """Divide by `ranks` the gradients that are what a step has used, so that their sum will be, too."""

    def sparse_dimensions(self, index: int) -> int:
        """How many of the current gradient's dimensions are sparse; 0 if it is dense.

        Where there is none: 0, unless it can only be sparse.
        """

    def sparse_entries(self, index: int, dimensions: int) -> tuple[Array, Array, bool]:
        """The current gradient's coordinates (entries, dimensions) and values, and whether there is one.

        Equal coordinates are added up; no entries where there is no gradient.
        """

    def deliver_sparse(self, index: int, coordinates: Array, values: Array) -> None:
        """Make these entries the gradient, equal coordinates added up; values may be wider than it is."""
