"""Every name, parameter, default and order of Horovod 0.28.1, or a line here that says it is missing.

The lists are exact both ways: what has appeared must be taken off, what is missing must stand here.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SURFACE: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("horovod_surface.json").read_text()
)["modules"]

MODULES_NOT_YET = {
    "horovod.common.elastic",
    "horovod.data.data_loader_base",
    "horovod.keras.elastic",
    "horovod.tensorflow.elastic",
    "horovod.torch.elastic",
}
NAMES_NOT_YET = {
    "horovod.common.exceptions": set[str](),
    "horovod.common.process_sets": set[str](),
    "horovod.keras": {"elastic"},
    "horovod.keras.callbacks": set[str](),
    "horovod.tensorflow": {"elastic"},
    "horovod.tensorflow.keras": {"elastic"},
    "horovod.torch": {"elastic"},
}
PARAMETERS_NOT_YET: dict[str, list[str]] = {}
# Required in Horovod; scripts that give them run as before.
OPTIONAL_HERE = {
    "horovod.tensorflow.broadcast_object": {"obj"},
    "horovod.torch.broadcast_object": {"obj"},
    "horovod.torch.broadcast_optimizer_state": {"root_rank"},
    "horovod.torch.broadcast_parameters": {"root_rank"},
}
# Not in the list of Horovod's calls, but used: `horovod.run` and private or inner names.
OTHERS_NOT_YET = {
    "horovod": {"run"},
    "horovod.runner": {"run"},
    "horovod.torch.compression": {"Compressor"},
    "horovod.torch.optimizer": {"_DistributedOptimizer"},
}

FRAMEWORKS = ("keras", "tensorflow", "torch")
MISSING = tuple(f"horovod.{name}" for name in FRAMEWORKS if find_spec(name) is None)
PRESENT = {module for module in SURFACE if not module.startswith(MISSING)} if MISSING else set(SURFACE)

HERE = sorted(PRESENT - MODULES_NOT_YET)
CALLS = [
    f"{module}.{name}"
    for module in HERE
    for name, fact in SURFACE[module].items()
    if fact["kind"] in ("function", "class") and name not in NAMES_NOT_YET[module]
]


def found(path: str) -> tuple[ModuleType, Any, dict[str, Any]]:
    """The module, the object in it, and the facts about it."""
    home, _, name = path.rpartition(".")
    module = importlib.import_module(home)
    return module, getattr(module, name), SURFACE[home][name]


def exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_the_modules_that_are_missing_are_those_on_the_list() -> None:
    assert {module for module in PRESENT if not exists(module)} == MODULES_NOT_YET & PRESENT
    assert NAMES_NOT_YET.keys() & PRESENT == set(HERE)


@pytest.mark.parametrize("module", HERE)
def test_the_names_that_are_missing_are_those_on_the_list(module: str) -> None:
    visible = dir(importlib.import_module(module))
    assert SURFACE[module].keys() - visible == NAMES_NOT_YET[module]


@pytest.mark.parametrize("module", OTHERS_NOT_YET)
def test_the_other_names_on_the_list_are_missing(module: str) -> None:
    assert OTHERS_NOT_YET[module].isdisjoint(dir(importlib.import_module(module)))


@pytest.mark.parametrize("framework", ["tensorflow", "torch"])
def test_compression_is_a_module_as_well(framework: str) -> None:
    if f"horovod.{framework}" not in PRESENT:
        pytest.skip(f"{framework} is not installed")
    module = importlib.import_module(f"horovod.{framework}.compression")
    assert module.Compression is importlib.import_module(f"hvdp.{framework}").Compression


@pytest.mark.parametrize("path", CALLS)
def test_calls_are_of_the_same_kind(path: str) -> None:
    _, value, fact = found(path)
    assert callable(value)
    assert inspect.isclass(value) == (fact["kind"] == "class")
    for base in fact.get("bases", []):
        if base.startswith("_impl."):
            continue  # Horovod's own, which its two Keras modules share
        # A framework's class, which need not be importable from here, by its name.
        assert base.rpartition(".")[2] in {ancestor.__name__ for ancestor in value.__mro__}


@pytest.mark.parametrize("path", CALLS)
def test_parameters_have_horovods_names_order_and_defaults(path: str) -> None:
    module, value, fact = found(path)
    if fact["kind"] == "function":
        compare(path, value, fact["params"], module)
    for method, parameters in fact.get("methods", {}).items():
        compare(f"{path}.{method}", getattr(value, method), [["self", None], *parameters], module)


def compare(path: str, value: Any, parameters: list[list[str | None]], module: ModuleType) -> None:
    theirs = {name: default for name, default in parameters if name and not name.startswith("*")}
    ours = inspect.signature(value).parameters
    missing = [name for name in theirs if name not in ours]
    assert missing == PARAMETERS_NOT_YET.get(path, []), f"{path}: missing is not what PARAMETERS_NOT_YET says"
    shared = [name for name in theirs if name in ours]
    assert list(ours)[: len(shared)] == shared, f"{path}: Horovod's parameters come first, in its order"
    for name in shared:
        assert ours[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, f"{path}: {name}"
    takes_anything = any(name and name.startswith("*") for name, _ in parameters)
    for name in list(ours)[len(shared) :] if not takes_anything else ():
        assert ours[name].default is not inspect.Parameter.empty, f"{path}: {name} is new and needs a default"
    required = {name for name, default in theirs.items() if default is None}
    optional = {name for name in required & ours.keys() if ours[name].default is not inspect.Parameter.empty}
    assert optional == OPTIONAL_HERE.get(path, set())
    for name, default in theirs.items():
        if default is not None and name in ours:
            expected = meaning(default, module)
            assert ours[name].default == expected, f"{path}: default of {name}"
            assert type(ours[name].default) is type(expected), f"{path}: type of the default of {name}"


def meaning(text: str, module: ModuleType) -> Any:
    """The value of a default as it is written: a literal, or a name in the module."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        return functools.reduce(getattr, text.split("."), module)
