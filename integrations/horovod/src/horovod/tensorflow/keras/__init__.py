"""hvdp.tensorflow.keras under Horovod's name."""

from hvdp.tensorflow.keras import *  # noqa: F403
