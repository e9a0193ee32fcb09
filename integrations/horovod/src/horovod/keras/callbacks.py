"""hvdp.keras.callbacks under Horovod's name."""

from hvdp.keras.callbacks import *  # noqa: F403
