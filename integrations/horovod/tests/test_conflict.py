"""Beside the real Horovod there is one clear line, and no mixture."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import horovod
import pytest

from hvdp.testing import Completed, run_script

PROJECT = Path(__file__).parents[1]
LINE = "hvdp-horovod cannot be installed over Horovod 0.28.1, found in {}: run `pip uninstall -y horovod"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of installed packages with the shim in it."""
    folder = tmp_path / "packages"
    shutil.copytree(Path(horovod.__file__).parent, folder / "horovod")
    (folder / "hvdp_horovod-0.1.0.dist-info").mkdir()
    (folder / "hvdp_horovod-0.1.0.dist-info" / "METADATA").write_text("Name: hvdp-horovod\nVersion: 0.1.0\n")
    return folder


def add_horovod(folder: Path, metadata: str = "horovod-0.28.1.dist-info/METADATA") -> None:
    """What pip leaves in a folder for the real Horovod, as far as metadata goes."""
    file = folder / metadata
    file.parent.mkdir(parents=True)
    file.write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")


def try_import(*folders: Path) -> Completed:
    path = ":".join(str(folder) for folder in folders)
    code = "import horovod; print(horovod.__file__); import horovod.common.process_sets"
    return run_script([sys.executable, "-c", code], env={"PYTHONPATH": path})


def test_alone_it_can_be_imported(installed: Path) -> None:
    done = try_import(installed)
    assert done.status == 0, done.stderr
    assert done.stdout.strip() == str(installed / "horovod" / "__init__.py")


@pytest.mark.parametrize(
    "metadata", ["horovod-0.28.1.dist-info/METADATA", "horovod-0.28.1-py3.11.egg-info/PKG-INFO"]
)
def test_in_one_folder_with_horovod_the_import_says_what_to_do(installed: Path, metadata: str) -> None:
    add_horovod(installed, metadata)
    done = try_import(installed)
    assert done.status == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {LINE.format(installed)}")


def test_horovod_in_another_folder_shares_no_file(installed: Path, tmp_path: Path) -> None:
    add_horovod(tmp_path / "system")
    done = try_import(installed, tmp_path / "system")
    assert done.status == 0, done.stderr


def test_what_a_broken_removal_leaves_is_no_horovod(installed: Path) -> None:
    (installed / "horovod-0.28.1.dist-info").mkdir()
    assert try_import(installed).status == 0


def test_installing_from_source_over_horovod_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.check_output([python, "-c", asked], text=True).strip())
    # The build tools come from here, so that nothing is downloaded.
    here = sysconfig.get_path("purelib")
    (packages / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests"))
    install: list[str | Path] = [
        *(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"),
        *("install", "--no-index", "--no-deps", "--no-build-isolation", project),
    ]
    add_horovod(packages)
    refused = run_script(install)
    assert refused.status != 0
    assert LINE.format(packages) in refused.stdout + refused.stderr
    assert not (packages / "horovod").exists()
    shutil.rmtree(packages / "horovod-0.28.1.dist-info")
    done = run_script(install)
    assert done.status == 0, done.stdout + done.stderr
    assert (packages / "horovod" / "torch" / "__init__.py").is_file()
