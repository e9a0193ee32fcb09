"""hvdp.torch under Horovod's name, with Horovod's submodules; `__version__` here is hvdp's."""

from horovod.torch import compression as compression
from horovod.torch import functions as functions
from horovod.torch import mpi_ops as mpi_ops
from horovod.torch import optimizer as optimizer
from hvdp.torch import *  # noqa: F403
