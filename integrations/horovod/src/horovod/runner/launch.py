"""`python -m horovod.runner.launch` is `horovodrun`."""

import sys

from hvdp.launch.cli import main as run_commandline

__all__ = ["run_commandline"]

if __name__ == "__main__":
    sys.exit(run_commandline())
