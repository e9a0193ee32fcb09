"""hvdp.keras under Horovod's name; `__version__` here is hvdp's."""

from hvdp.keras import *  # noqa: F403
