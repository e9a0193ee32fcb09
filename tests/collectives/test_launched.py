"""The tests for any size, as a user would run them: every rank a pytest of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hvdp.errors import LaunchError
from hvdp.launch.mpiexec import find
from hvdp.testing import run_script

TESTS = Path(__file__).with_name("test_any_size.py")
# In a folder of its own: pytests that number theirs side by side clear away each other's.
PYTEST = ["sh", "-c", 'exec "$0" "$@" --basetemp "$TMPDIR/pytest-$$"']
PYTEST += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _mpiexec() -> str:
    try:
        return find(os.environ).path
    except LaunchError:
        pytest.skip("no mpiexec is installed")


def _check(command: list[str], size: int, **env: str) -> None:
    settings = {"HVDP_TEST_SIZE": str(size), "OMP_NUM_THREADS": "1", **AS_ROOT, **env}
    done = run_script(command, env=settings, cwd=TESTS.parents[2], timeout=100)
    assert done.status == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed in ") == size, done.stdout
    assert "failed" not in done.stdout


def test_under_plain_mpiexec() -> None:
    _check([_mpiexec(), "-n", "2", *PYTEST], 2)


def test_under_plain_mpiexec_over_mpi() -> None:
    _check([_mpiexec(), "-n", "2", *PYTEST], 2, HVDP_CPU_OPERATIONS="mpi")


def test_under_horovodrun() -> None:
    _check([sys.executable, "-m", "hvdp.launch", "-np", "3", *PYTEST], 3)
