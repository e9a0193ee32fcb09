"""The collectives and what they take; as in `horovod.torch`."""

from hvdp.torch import *  # noqa: F403
