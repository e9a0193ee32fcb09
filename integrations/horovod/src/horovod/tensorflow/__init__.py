"""hvdp.tensorflow under Horovod's name; `__version__` here is hvdp's."""

from horovod.tensorflow import compression as compression
from hvdp.tensorflow import *  # noqa: F403
