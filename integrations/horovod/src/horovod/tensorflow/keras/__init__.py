"""hvdp.tensorflow.keras under Horovod's name."""

from horovod.tensorflow.keras import callbacks as callbacks
from hvdp.tensorflow.keras import *  # noqa: F403
