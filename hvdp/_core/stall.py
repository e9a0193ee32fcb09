"""Reports of names that some ranks have submitted and others have not, for too long."""

from __future__ import annotations

import logging
import time

from hvdp._core.coordinator import Coordinator, Stall
from hvdp._core.ops import Signature
from hvdp._core.wording import ranks_text
from hvdp.errors import HorovodInternalError

__all__ = ["StallWatch"]

_log = logging.getLogger(__name__)


class StallWatch:
    """On rank 0: warns once a name, and ends the job if so configured.

    Args:
        warn_after: seconds until the warning; 0 disables the watch.
        end_after: seconds until HorovodInternalError ends the job; 0 never.
    """

    def __init__(self, warn_after: float, end_after: float) -> None:
        self._warn_after = warn_after
        self._end_after = end_after
        self._warned: set[Signature] = set()
        self._looked = time.monotonic()

    @property
    def interval(self) -> float | None:
        """Seconds after which `look` may have something new; None is never."""
        if self._warn_after <= 0:
            return None
        return max(0.05, min(self._warn_after, self._end_after or self._warn_after) / 4)

    def look(self, coordinator: Coordinator) -> None:
        """Warn of stalls that are due; called as often as one likes.

        Raises:
            HorovodInternalError: one lasts longer than `end_after`.
        """
        now = time.monotonic()
        if self.interval is None or now - self._looked < self.interval:
            return
        self._looked = now
        stalls = coordinator.stalls(min(self._warn_after, self._end_after or self._warn_after))
        self._warned &= {stall.signature for stall in stalls}
        for stall in stalls:
            if 0 < self._end_after <= stall.seconds:
                report = (
                    f"stalled for {stall.seconds:.0f} s, more than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: "
                    f"{_text(stall)}"
                )
                # Logged as well: the launcher shows the traceback of the rank that is missing.
                _log.error(report)
                raise HorovodInternalError(report, stall.missing[0] if stall.missing else None)
            if stall.signature not in self._warned and stall.seconds >= self._warn_after:
                self._warned.add(stall.signature)
                _log.warning("stalled for %.0f s: %s", stall.seconds, _text(stall))


def _text(stall: Stall) -> str:
    what = f"{stall.signature.kind.value} {stall.signature.name!r}"
    where = f" in process set {stall.signature.process_set}" if stall.signature.process_set else ""
    return (
        f"{what}{where} was submitted by {ranks_text(stall.present)} and not by {ranks_text(stall.missing)}. "
        "Do all ranks run the same steps?"
    )
