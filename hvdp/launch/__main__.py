"""`python -m hvdp.launch` is `hvdprun`."""

from __future__ import annotations

import sys

from hvdp.launch.cli import main

sys.exit(main())
