"""Horovod's import names on top of hvdp, for scripts that are to run unchanged.

Every name is hvdp's own object; nothing is done here.

Attributes:
    __version__: the Horovod release whose calls these are, for scripts that compare versions.
        What is installed, and does the work, is `hvdp.__version__`.
"""

from pathlib import Path

from horovod._conflict import conflict as _conflict

_reason = _conflict(Path(__file__).parents[1])
if _reason is not None:
    raise ImportError(_reason)

__all__ = ["__version__"]

__version__ = "0.28.1"
