"""The command line of `horovodrun`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from hvdp.errors import LaunchError

__all__ = ["EXAMPLE", "Options", "parse"]

EXAMPLE = "hvdprun -np 2 python train.py"

_LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")

# Horovod's flags that steer machinery hvdp does not have, with how many values each takes.
_IGNORED: dict[str, int] = {
    "--disable-cache": 0,
    "--network-interfaces": 1,
    "--network-interface": 1,
    "--ssh-port": 1,
    "-p": 1,
    "--ssh-identity-file": 1,
    "-i": 1,
    "--cycle-time-ms": 1,
    "--hierarchical-allreduce": 0,
    "--no-hierarchical-allreduce": 0,
    "--hierarchical-allgather": 0,
    "--no-hierarchical-allgather": 0,
    "--torus-allreduce": 0,
    "--no-torus-allreduce": 0,
    "--autotune": 0,
    "--no-autotune": 0,
    "--autotune-log-file": 1,
    "--autotune-warmup-samples": 1,
    "--autotune-steps-per-sample": 1,
    "--autotune-bayes-opt-max-samples": 1,
    "--autotune-gaussian-process-noise": 1,
    "--timeline-mark-cycles": 0,
    "--no-timeline-mark-cycles": 0,
    "--mpi-threads-disable": 0,
    "--no-mpi-threads-disable": 0,
    "--tcp": 0,
    "--binding-args": 1,
    "--num-nccl-streams": 1,
    "--thread-affinity": 1,
    "--gloo-timeout-seconds": 1,
    "--log-with-timestamp": 0,
    "--log-without-timestamp": 0,
    "--log-hide-timestamp": 0,
    "--no-log-hide-timestamp": 0,
}

# Flags whose being ignored would run another job than the one asked for.
_REFUSED: dict[str, tuple[int, str]] = {
    "--min-np": (1, "elastic jobs"),
    "--min-num-proc": (1, "elastic jobs"),
    "--max-np": (1, "elastic jobs"),
    "--max-num-proc": (1, "elastic jobs"),
    "--slots-per-host": (1, "elastic jobs"),
    "--elastic-timeout": (1, "elastic jobs"),
    "--reset-limit": (1, "elastic jobs"),
    "--blacklist-cooldown-range": (2, "elastic jobs"),
    "--host-discovery-script": (1, "elastic jobs"),
    "--config-file": (1, "configuration files"),
    "--jsrun": (0, "jsrun"),
}


@dataclass
class Options:
    """What was asked for. Sizes in MiB and times in seconds, as typed."""

    command: list[str] = field(default_factory=list)
    num_proc: int | None = None
    version: bool = False
    check_build: bool = False
    verbose: bool = False
    mpi: bool = False
    gloo: bool = False
    mpi_args: str | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    output_filename: Path | None = None
    timestamps: bool = False
    start_timeout: float | None = None
    log_level: str | None = None
    fusion_threshold_mb: float | None = None
    cache_capacity: int | None = None
    timeline_filename: str | None = None
    stall_check: bool | None = None
    stall_warning_time: int | None = None
    stall_shutdown_time: int | None = None
    ignored: list[str] = field(default_factory=list)

    def variables(self) -> dict[str, str]:
        """The environment variables that the ranks read these settings from."""
        values = {
            "HOROVOD_START_TIMEOUT": self.start_timeout,
            "HOROVOD_LOG_LEVEL": self.log_level,
            "HOROVOD_FUSION_THRESHOLD": _bytes(self.fusion_threshold_mb),
            "HOROVOD_CACHE_CAPACITY": self.cache_capacity,
            "HOROVOD_TIMELINE": self.timeline_filename,
            "HOROVOD_STALL_CHECK_DISABLE": None if self.stall_check is None else int(not self.stall_check),
            "HOROVOD_STALL_CHECK_TIME_SECONDS": self.stall_warning_time,
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": self.stall_shutdown_time,
        }
        return {
            name: f"{value:g}" if isinstance(value, float) else str(value)
            for name, value in values.items()
            if value is not None
        }


def _bytes(mebibytes: float | None) -> int | None:
    # Horovod's zero turns bucketing off: then every gradient is its own bucket.
    return None if mebibytes is None else max(1, int(mebibytes * (1 << 20)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}. Try --help, or for example: {EXAMPLE}")


class _Ignore(argparse.Action):
    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, flag: object = None
    ) -> None:
        namespace.ignored = [*namespace.ignored, flag]


class _Refuse(argparse.Action):
    def __call__(self, parser: object, namespace: object, values: object, flag: object = None) -> None:
        raise LaunchError(f"{flag}: hvdp has no {_REFUSED[str(flag)][1]}; leave the flag out")


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wants the number of processes, 1 or more. Received: {text!r}")
    return int(text)


def _at_least_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"wants a number of at least 0. Received: {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"wants a whole number of at least 0. Received: {text!r}")
    return int(text)


def parse(arguments: Sequence[str], program: str) -> Options:
    """Read the command line.

    Raises:
        LaunchError: it cannot be meant; the text says what to type instead.
        SystemExit: after `--help`.
    """
    options = Options(**vars(_parser(program).parse_args(arguments)))
    if options.command[:1] == ["--"]:
        del options.command[0]
    return options


def _parser(program: str) -> _Parser:
    parser = _Parser(
        prog=program,
        description="Start the processes of a data-parallel job and see them through.",
        usage=f"{program} -np N [flags] command [arguments]",
        epilog=f"Example: {EXAMPLE}",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "--num-proc", type=_ranks, metavar="N", help="number of processes")
    add("-v", "--version", action="store_true", help="print the version")
    add("-cb", "--check-build", action="store_true", help="print what is installed and usable")
    add("--verbose", action="store_true", help="say what is started and how")
    add("--output-filename", type=Path, metavar="DIR", help="also write DIR/rank.N/stdout and stderr")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", dest="timestamps", action="store_true")
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="where to run; other hosts imply --mpi")
    add("-hostfile", "--hostfile", type=Path, metavar="FILE", help="the same, one 'host slots=N' a line")
    add("--mpi", action="store_true", help="start through the installed MPI's mpiexec")
    add("--gloo", action="store_true", help="do not use MPI (the default on one host)")
    add("--mpi-args", metavar="ARGS", help="further arguments for mpiexec, in one string")
    add("--start-timeout", type=_at_least_zero, metavar="SECONDS", help="how long ranks wait for each other")
    add("--log-level", type=str.upper, choices=_LOG_LEVELS)
    add("--fusion-threshold-mb", type=_at_least_zero, metavar="MB", help="largest gradient bucket")
    add("--cache-capacity", type=_count, metavar="N", help="operations remembered by a short id")
    add("--timeline-filename", metavar="FILE", help="write a timeline of the operations")
    add("--stall-check", action=argparse.BooleanOptionalAction, help="warn about ranks that do not come")
    add("--stall-check-warning-time-seconds", dest="stall_warning_time", type=_count, metavar="SECONDS")
    add("--stall-check-shutdown-time-seconds", dest="stall_shutdown_time", type=_count, metavar="SECONDS")
    hidden = argparse.SUPPRESS
    for flag, count in _IGNORED.items():
        add(flag, dest="ignored", action=_Ignore, nargs=count or 0, default=[], help=hidden)
    for flag, (count, _) in _REFUSED.items():
        add(flag, dest="ignored", action=_Refuse, nargs=count or 0, default=[], help=hidden)
    add("command", nargs=argparse.REMAINDER, help=hidden)
    return parser
