"""hvdp.keras under Horovod's name; `__version__` here is hvdp's."""

from horovod.keras import callbacks as callbacks
from hvdp.keras import *  # noqa: F403
