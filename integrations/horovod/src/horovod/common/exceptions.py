"""The exceptions that scripts catch. hvdp raises only the first; see each."""

from hvdp import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed; never raised, for hvdp's jobs keep their hosts.

    Attributes:
        skip_sync: whether the state need not be synchronised after it.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework is not the one that was compiled against; never raised, for hvdp compiles nothing.

    Attributes:
        name: the framework.
        version: the one found.
        installed_version: the one compiled against.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"built for {name} {installed_version}; installed is {version}", name=name)
        self.version = version
        self.installed_version = installed_version
