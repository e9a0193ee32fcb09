"""The real Horovod and these modules cannot share a folder: each would overwrite the other's files."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

__all__ = ["conflict"]


def conflict(folder: Path) -> str | None:
    """Why hvdp-horovod must not be in `folder`, in one line; None where it may.

    Only a distribution named horovod in that very folder counts. In another one, as below a
    virtual environment with system packages, no file is shared and the first on `sys.path` is used.
    """
    for found in distributions(name="horovod", path=[str(folder)]):
        # A dist-info folder without metadata is what a broken removal leaves behind.
        if found.read_text("METADATA") or found.read_text("PKG-INFO"):
            return (
                f"hvdp-horovod cannot be installed over Horovod {found.version}, found in {folder}: "
                "run `pip uninstall -y horovod hvdp-horovod`, then install hvdp-horovod again"
            )
    return None
