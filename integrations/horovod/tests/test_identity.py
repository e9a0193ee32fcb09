"""The names here are hvdp's own objects, and helpers do what they say."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
from pathlib import Path

import horovod
import horovod.torch
import pytest
from horovod.common import exceptions, process_sets, util

import hvdp
import hvdp.torch

SOURCES = Path(horovod.__file__).parent


@pytest.mark.parametrize("module", ["horovod.torch", "horovod.torch.mpi_ops"])
def test_torch_modules_hold_all_of_hvdps_objects(module: str) -> None:
    shim = importlib.import_module(module)
    assert [name for name in hvdp.torch.__all__ if getattr(shim, name) is not getattr(hvdp.torch, name)] == []


@pytest.mark.parametrize(
    "module", ["horovod.torch.compression", "horovod.torch.functions", "horovod.torch.optimizer"]
)
def test_torch_submodules_hold_hvdps_objects(module: str) -> None:
    shim = importlib.import_module(module)
    for name in shim.__all__:
        assert getattr(shim, name) is getattr(hvdp.torch, name)


def test_common_modules_hold_hvdps_objects() -> None:
    for name in process_sets.__all__:
        assert getattr(process_sets, name) is getattr(hvdp, name)
    assert exceptions.HorovodInternalError is hvdp.HorovodInternalError
    for name in ("cuda_built", "gloo_built", "mpi_built", "nccl_built", "rocm_built"):
        assert getattr(util, name) is getattr(hvdp, name)


def test_what_hvdp_gets_is_not_written_twice() -> None:
    own = {"HostsUpdatedInterrupt", "HorovodVersionMismatchError"}
    assert own.isdisjoint(dir(hvdp) + dir(hvdp.errors)), "take it from hvdp instead"


def test_only_public_names_of_hvdp_are_used() -> None:
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hvdp"):
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
                assert not [name for name in names if name.startswith("_")], f"{file}: {names}"


def test_the_version_is_of_the_release_whose_calls_these_are() -> None:
    assert horovod.__version__ == "0.28.1"
    assert horovod.torch.__version__ == hvdp.__version__


def test_exceptions_can_be_caught_and_made() -> None:
    assert exceptions.HostsUpdatedInterrupt(True).skip_sync is True
    error = exceptions.HorovodVersionMismatchError("torch", "2.5", "2.4")
    assert (error.name, error.version, error.installed_version) == ("torch", "2.5", "2.4")
    assert str(error) == "built for torch 2.4; installed is 2.5"


def test_extensions() -> None:
    assert util.extension_available("torch")
    assert not util.extension_available("mxnet")
    assert not util.gpu_available("mxnet")
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"^horovod\.mxnet needs mxnet, and an adapter for it in hvdp$"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")


def test_env_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIM_KEPT", "before")
    monkeypatch.delenv("SHIM_NEW", raising=False)
    inside: list[str | None] = []
    with contextlib.suppress(RuntimeError), util.env(SHIM_KEPT=None, SHIM_NEW="1"):
        inside += [os.environ.get("SHIM_KEPT"), os.environ.get("SHIM_NEW")]
        raise RuntimeError
    assert inside == [None, "1"]
    assert os.environ["SHIM_KEPT"] == "before"
    assert "SHIM_NEW" not in os.environ


@pytest.mark.parametrize(
    ("number", "expected"),
    [(2, [[0, 1, 2], [3, 4]]), (5, [[0], [1], [2], [3], [4]]), (7, [[0], [1], [2], [3], [4], [], []])],
)
def test_split_list(number: int, expected: list[list[int]]) -> None:
    assert util.split_list([0, 1, 2, 3, 4], number) == expected


def test_small_questions() -> None:
    assert [n for n in range(-1, 10) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    values: list[object] = [[], "", iter(()), 3, list]
    assert [util.is_iterable(value) for value in values] == [True, True, True, False, False]
