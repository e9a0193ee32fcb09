"""Settings come from the environment, and what cannot be meant is named."""

from __future__ import annotations

import dataclasses

import pytest

from hvdp._core.config import Config
from hvdp.errors import InvalidArgumentError


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Config.from_env({}) == Config()
    assert Config.from_env({"HVDP_CPU_OPERATIONS": " ", "HVDP_FUSION_THRESHOLD": ""}) == Config()


@pytest.mark.parametrize("prefix", ["HVDP_", "HOROVOD_"])
@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("CPU_OPERATIONS", "MPI", "cpu_operations", "mpi"),
        ("CPU_OPERATIONS", " shm ", "cpu_operations", "shm"),
        ("FUSION_THRESHOLD", "1024", "fusion_threshold", 1024),
        ("CACHE_CAPACITY", "0", "cache_capacity", 0),
        ("START_TIMEOUT", "2.5", "start_timeout", 2.5),
        ("LOG_LEVEL", "debug", "log_level", "DEBUG"),
    ],
)
def test_each_setting_under_both_names(prefix: str, name: str, text: str, field: str, value: object) -> None:
    config = Config.from_env({prefix + name: text})
    assert config == dataclasses.replace(Config(), **{field: value})


def test_our_own_name_wins() -> None:
    env = {"HOROVOD_FUSION_THRESHOLD": "1", "HVDP_FUSION_THRESHOLD": "2"}
    assert Config.from_env(env).fusion_threshold == 2


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("HVDP_CPU_OPERATIONS", "gloo"),
        ("HOROVOD_FUSION_THRESHOLD", "64MB"),
        ("HVDP_FUSION_THRESHOLD", "0"),
        ("HOROVOD_CACHE_CAPACITY", "-1"),
        ("HVDP_START_TIMEOUT", "soon"),
        ("HVDP_START_TIMEOUT", "nan"),
        ("HOROVOD_LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_names_the_variable_and_what_it_held(key: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{key} must be .*Received: '{text}'$"):
        Config.from_env({key: text})
