"""The one tree of exceptions.

HvdpError
├── NotInitializedError        a call that needs `init()` came before it (also a ValueError)
├── InvalidArgumentError       one rank's argument is wrong by itself (also a ValueError)
├── MismatchError              ranks disagree about one operation; raised on every member (also a ValueError)
├── TransportError             a transport is missing, unusable or out of room (also a RuntimeError)
├── RendezvousError            the ranks did not find each other (also a RuntimeError)
├── LaunchError                the launcher cannot start the job (also a RuntimeError)
└── HorovodInternalError       a peer has gone; the job cannot go on (also a RuntimeError)

After any of them except `HorovodInternalError` the next correct call works. After
`HorovodInternalError` every call raises it again until `shutdown()` and `init()`.
"""

from __future__ import annotations

__all__ = [
    "HorovodInternalError",
    "HvdpError",
    "InvalidArgumentError",
    "LaunchError",
    "MismatchError",
    "NotInitializedError",
    "RendezvousError",
    "TransportError",
]


class HvdpError(Exception):
    """Base of every exception that hvdp raises on purpose."""


class NotInitializedError(HvdpError, ValueError):
    """A call that needs a running engine was made before `init()` or after `shutdown()`."""

    def __init__(self, call: str) -> None:
        super().__init__(f"hvdp is not initialised: call hvd.init() before hvd.{call}().")


class InvalidArgumentError(HvdpError, ValueError):
    """An argument is wrong on its own, whatever the other ranks passed."""


class MismatchError(HvdpError, ValueError):
    """Ranks submitted different things under one name; every member raises the same text."""


class TransportError(HvdpError, RuntimeError):
    """A transport is not installed, not usable between these ranks, or out of room."""


class RendezvousError(HvdpError, RuntimeError):
    """The processes of a job did not find, or did not trust, each other."""


class LaunchError(HvdpError, RuntimeError):
    """The launcher cannot start the job as asked."""


class HorovodInternalError(HvdpError, RuntimeError):
    """The job is broken: a rank has died, left or aborted.

    Attributes:
        rank: the rank that failed first, or None where no single rank is to blame.
    """

    def __init__(self, message: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
