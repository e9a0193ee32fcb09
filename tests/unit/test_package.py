"""What the package promises before anybody calls it, and what the README says about it."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import hvdp
from hvdp._core.config import Config

ROOT = Path(__file__).parents[2]
PACKAGE = Path(hvdp.__file__).parent
README = (ROOT / "README.md").read_text()
HEAVY = {"torch", "tensorflow", "keras", "jax", "mpi4py", "nccl", "sklearn", "rich", "scipy"}

PROBE = """
import json, logging, sys, threading, types
import hvdp
visible = [
    name for name, value in vars(hvdp).items()
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
]
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "threads": [thread.name for thread in threading.enumerate()],
    "root_handlers": len(logging.root.handlers),
    "handlers": [type(handler).__name__ for handler in logging.getLogger("hvdp").handlers],
    "initialized": hvdp.is_initialized(),
    "visible": sorted(visible),
}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, object]:
    """What a fresh interpreter looks like after `import hvdp`."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_import_loads_no_framework_and_no_mpi(imported: dict[str, list[str]]) -> None:
    assert HEAVY.isdisjoint(imported["modules"])


def test_import_starts_nothing(imported: dict[str, object]) -> None:
    assert imported["threads"] == ["MainThread"]
    assert imported["initialized"] is False


def test_import_leaves_logging_to_the_application(imported: dict[str, object]) -> None:
    assert imported["root_handlers"] == 0
    assert imported["handlers"] in ([], ["NullHandler"])


def test_all_is_what_can_be_seen(imported: dict[str, list[str]]) -> None:
    public = [name for name in hvdp.__all__ if name != "__version__"]
    assert imported["visible"] == sorted(public)
    assert len(set(hvdp.__all__)) == len(hvdp.__all__)


@pytest.mark.parametrize("name", [name for name in hvdp.__all__ if callable(getattr(hvdp, name))])
def test_everything_public_is_documented(name: str) -> None:
    assert getattr(hvdp, name).__doc__, f"hvdp.{name} has no docstring"


def test_files_stay_small() -> None:
    long = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 350
    }
    assert not long, "a file this long holds two ideas: split it"


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_scripts_use_public_names_only(folder: str) -> None:
    for script in (ROOT / folder).rglob("*.py"):
        private = [name for name in _imports(script) if re.search(r"^hvdp\b.*\._", name)]
        assert not private, f"{script.name} reaches into hvdp: {private}"


def _imports(script: Path) -> list[str]:
    """Full names of all that a script imports."""
    names = []
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_versions_agree() -> None:
    assert distribution("hvdp").version == hvdp.__version__


def _readme_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_the_readme_has_two_commands_and_ci_runs_the_second() -> None:
    demo, tests = _readme_blocks("bash")
    assert demo.rstrip().endswith("horovodrun -np 2 python examples/torch_digits.py")
    assert tests.rstrip().endswith("pytest -n 2")
    marked = README.index("<!-- .ci/run executes this block")
    assert README.index(demo) < marked < README.index(tests)


def test_what_the_readme_names_exists() -> None:
    text = "\n".join(_readme_blocks("bash"))
    extras = {name for group in re.findall(r"'\.\[([\w,-]+)\]'", README) for name in group.split(",")}
    assert extras <= set(distribution("hvdp").metadata.get_all("Provides-Extra") or [])
    commands = {entry.name for entry in distribution("hvdp").entry_points}
    assert {"horovodrun", "hvdprun"} <= commands
    for path in [*re.findall(r"\b(?:examples|benchmarks)/\w+\.py", README), "constraints.txt"]:
        assert (ROOT / path).is_file(), path
    assert "constraints.txt" in text
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_the_installed_commands_are_found() -> None:
    scripts = Path(sys.executable).parent
    for name in ("horovodrun", "hvdprun"):
        assert shutil.which(name, path=str(scripts)), f"{name} is not installed beside {sys.executable}"


class _Recorder(dict[str, str]):
    """An empty environment that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def get(self, key: str, default: str = "") -> str:  # type: ignore[override]
        self.asked.add(key)
        return default


def test_the_readme_lists_every_setting_with_its_default() -> None:
    rows = re.findall(r"^\| `(HVDP_\w+)` \|.*\| `?([^|`]+?)`? \|$", README, flags=re.MULTILINE)
    read = _Recorder()
    Config.from_env(read)
    assert {name for name, _ in rows} == {name for name in read.asked if name.startswith("HVDP_")}
    assert Config.from_env(dict(rows)) == Config()


def test_every_tested_requirement_is_pinned() -> None:
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    pinned = {_normal(name) for name in pins}
    untested = {"nccl4py"}
    for requirement in distribution("hvdp").requires or []:
        name = _normal(re.split(r"[^\w.-]", requirement)[0])
        assert name in pinned | untested | {"hvdp"}, f"{name} has no pin in constraints.txt"


def test_nothing_that_stands_in_for_horovod_is_required() -> None:
    """Whoever has Horovod itself keeps it: `hvdp-horovod`, which takes its name, is only for who asks."""
    required = {_normal(re.split(r"[^\w.-]", text)[0]) for text in distribution("hvdp").requires or []}
    assert {"numpy", "torch"} <= required, "the requirements, extras' as well, were not found"
    assert not {name for name in required if "horovod" in name}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
