"""Refuses to build where the wheel would be installed over the real Horovod."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RefuseBesideHorovod(BuildHookInterface[Any]):
    """Looks where pip will install: also an isolated build has its environment's own prefix."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        conflict = runpy.run_path(str(Path(self.root, "src", "horovod", "_conflict.py")))["conflict"]
        for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            reason = conflict(Path(folder))
            if reason is not None:
                raise SystemExit(reason)
