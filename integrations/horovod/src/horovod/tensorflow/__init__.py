"""hvdp.tensorflow under Horovod's name; `__version__` here is hvdp's."""

from hvdp.tensorflow import *  # noqa: F403
