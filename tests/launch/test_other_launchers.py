"""Started by somebody else's launcher, or through it on several hosts."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from hvdp.errors import LaunchError
from hvdp.launch.hosts import Host, is_here, parse_hostfile, parse_hosts, place_ranks
from hvdp.launch.mpiexec import Mpiexec, find
from hvdp.testing import run_script

PRINT_PLACE = (
    "import os, sys; from hvdp.launch.environments import detect; p = detect(os.environ);"
    "sys.stdout.write(f'{p.launcher} {p.rank} {p.size} {p.address}\\n')"
)


def _check_places(lines: list[str], prefix: str) -> None:
    words = sorted(line.rsplit(" ", 3) for line in lines)
    assert [line[1:3] for line in words] == [["0", "2"], ["1", "2"]]
    assert words[0][3] == words[1][3]
    assert words[0][3].startswith(prefix)


def test_plain_mpiexec(mpiexec: str) -> None:
    command = [mpiexec, "-n", "2", sys.executable, "-c", PRINT_PLACE]
    done = run_script(command, env={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    assert done.status == 0, done.stderr
    _check_places(done.stdout.splitlines(), "unix:hvdp-")


def test_two_plain_mpiexecs_do_not_meet(mpiexec: str) -> None:
    command = [mpiexec, "-n", "1", sys.executable, "-c", PRINT_PLACE]
    env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    first, second = run_script(command, env=env), run_script(command, env=env)
    assert first.stdout.startswith(("mpiexec 0 1 unix:", "Open MPI 0 1 unix:"))
    assert first.stdout != second.stdout


def test_torchrun(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    program = tmp_path / "place.py"
    program.write_text(PRINT_PLACE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_script([*torchrun, program], env={"OMP_NUM_THREADS": "1"})
    assert done.status == 0, done.stderr
    _check_places(done.stdout.splitlines(), "unix:hvdp-torchrun-")


@pytest.fixture
def two_hosts() -> list[str]:
    """Flags for a job on what the MPI believes to be two hosts."""
    try:
        dialect = find(os.environ).dialect
    except LaunchError:
        pytest.skip("no mpiexec is installed")
    if dialect != "hydra":
        pytest.skip("only hydra can be made to believe in a second host without ssh")
    return ["-H", "127.0.0.2:1,localhost:1", "--mpi-args", "-launcher fork"]


def test_several_hosts_meet_over_mpi(start, two_hosts) -> None:
    running = start(args=[*two_hosts, sys.executable, "-c", PRINT_PLACE])
    assert running.end() == 0
    assert sorted(running.out) == ["[0]<stdout>:mpiexec 0 2 mpi", "[1]<stdout>:mpiexec 1 2 mpi"]


def test_several_hosts_lines_do_not_tear(start, two_hosts) -> None:
    program = "import os\nfor i in range(2000): print(os.environ['PMI_RANK'] * 200)"
    running = start(args=[*two_hosts, sys.executable, "-c", program])
    assert running.end() == 0
    assert sorted(running.out) == ["[0]<stdout>:" + "0" * 200] * 2000 + ["[1]<stdout>:" + "1" * 200] * 2000


def test_several_hosts_report_the_failure_once_and_last(start, two_hosts) -> None:
    body = "if rank == 1: raise ValueError('mine')\nblocked()"
    running = start(body, flags=(*two_hosts,))
    assert running.end() == 1
    assert running.seconds < 10
    assert running.err[-1] == "hvdprun: rank 1 of 2 failed: exited with status 1"
    assert running.err[-2] == "[1]<stderr>:ValueError: mine"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_several_hosts_end_with_the_launcher(start, two_hosts, gone, number: signal.Signals) -> None:
    running = start("print('ready', flush=True)\nblocked()", flags=(*two_hosts,))
    running.wait_for("ready", 2)
    family = running.family()
    running.send(number)
    assert running.end() == (-number if number == signal.SIGKILL else 128 + number)
    assert gone(family, 5) == []


def test_an_unreachable_host_is_an_error(start, two_hosts) -> None:
    running = start(args=["-np", "2", "-H", "nohost.invalid:2", "true"])
    assert running.end() != 0
    assert running.err[-1].startswith("hvdprun: the job of 2 ranks failed: mpiexec exited with status")


def test_hosts_are_parsed() -> None:
    assert parse_hosts("a:2,b") == [Host("a", 2), Host("b", 1)]
    assert is_here(Host("localhost", 1))
    assert not is_here(Host("elsewhere", 1))
    assert place_ranks([Host("a", 2), Host("b", 4)], 3) == [Host("a", 2), Host("b", 1)]
    assert place_ranks([Host("a", 2), Host("b", 4)], 2) == [Host("a", 2)]
    for wrong in ("", "a:", ":2", "a:0", "a:2,,b"):
        with pytest.raises(LaunchError, match="Received"):
            parse_hosts(wrong)


def test_hostfiles_are_parsed(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two hosts\na slots=2\n\nb:3 # big\nc\n")
    assert parse_hostfile(file) == [Host("a", 2), Host("b", 3), Host("c", 1)]
    file.write_text("a two\n")
    with pytest.raises(LaunchError, match="line 1"):
        parse_hostfile(file)
    file.write_text("\n")
    with pytest.raises(LaunchError, match="names no host"):
        parse_hostfile(file)


def test_dialects() -> None:
    hosts = [Host("a", 1), Host("b", 2)]
    variables = {"HVDP_JOB": "1", "HOROVOD_CYCLE_TIME": "1", "HOME": "/", "OMP_NUM_THREADS": "4"}
    hydra = Mpiexec("mpiexec", "hydra", "5").command(
        3, ["prog", "x y"], hosts, variables, extra="-bind-to 'a b'"
    )
    assert hydra == ["mpiexec", "-n", "3", "-hosts", "a:1,b:2", "-bind-to", "a b", "prog", "x y"]
    openmpi = Mpiexec("mpiexec", "openmpi", "5").command(3, ["prog"], hosts, variables, extra=None)
    assert openmpi[:5] == ["mpiexec", "-n", "3", "-H", "a:1,b:2"]
    assert [name for flag, name in itertools.pairwise(openmpi) if flag == "-x"] == [
        "HOROVOD_CYCLE_TIME",
        "HVDP_JOB",
        "OMP_NUM_THREADS",
    ]
    assert openmpi[-1] == "prog"


def test_the_gone_helper_sees_the_living(gone) -> None:
    assert gone([psutil.Process()], 0) == [psutil.Process()]
