"""What a newcomer may type, and what the ranks are given."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hvdp._version
from hvdp.launch.arguments import parse
from hvdp.launch.cores import share, usable_cores
from hvdp.testing import run_script

LAUNCH = [sys.executable, "-m", "hvdp.launch"]
PRINT_ENV = "import json, os; print(json.dumps(dict(os.environ)))"


def _environments(running) -> list[dict[str, str]]:
    assert running.end() == 0, running.err
    found = [json.loads(line.partition(">:")[2]) for line in running.out]
    return sorted(found, key=lambda env: int(env.get("HOROVOD_RANK") or env["PMI_RANK"]))


@pytest.mark.parametrize("program", ["horovodrun", "hvdprun"])
def test_all_names_are_one_program(program: str) -> None:
    script = Path(sys.executable).parent / program
    if not script.exists():
        pytest.skip("the scripts are not installed")
    done = run_script([script, "-np", "2", sys.executable, "-c", "print('x')"])
    assert done.status == 0
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:x", "[1]<stdout>:x"]


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_version(flag: str) -> None:
    done = run_script([*LAUNCH, flag])
    assert (done.status, done.stdout) == (0, f"{hvdp._version.__version__}\n")


@pytest.mark.parametrize("flag", ["-cb", "--check-build"])
def test_check_build(flag: str) -> None:
    done = run_script([*LAUNCH, flag])
    assert done.status == 0
    assert "[X] shm" in done.stdout
    for name in ("PyTorch", "Keras", "TensorFlow", "JAX", "mpi", "nccl", "mpiexec"):
        assert f"] {name}" in done.stdout


def test_check_build_survives_broken_packages(tmp_path: Path) -> None:
    for name in ("torch", "keras", "mpi4py"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("import os; os.abort()")
    (tmp_path / "jax.py").write_text("raise RuntimeError('broken')")
    done = run_script([*LAUNCH, "-cb"], env={"PYTHONPATH": str(tmp_path)})
    assert done.status == 0
    assert "[ ] mpi" in done.stdout


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        ([], "-np"),
        (["-np", "2"], "say what to run after the flags"),
        (["python", "train.py"], "-np"),
        (["-np", "0", "true"], "1 or more. Received: '0'"),
        (["-np", "two", "true"], "Received: 'two'"),
        (["-np", "2", "no-such-command"], "there is no command 'no-such-command'"),
        (["-np", "2", "train.py"], "python train.py"),
        (["-np", "2", "--bogus", "true"], "--bogus"),
        (["-np", "2", "--log-level", "loud", "true"], "invalid choice"),
        (["-np", "3", "-H", "localhost:2", "true"], "slots"),
        (["-np", "2", "-H", "localhost:x", "true"], "localhost:x"),
        (["-np", "2", "--hostfile", "/no/such/file", "true"], "/no/such/file"),
        (["-np", "2", "--min-np", "1", "true"], "elastic"),
        (["-np", "2", "--mpi", "--gloo", "true"], "contradict"),
        (["-np", "2", "--output-filename", "/dev/null/x", "true"], "/dev/null/x"),
    ],
)
def test_a_wrong_line_gets_one_line_back(args: list[str], hint: str) -> None:
    done = run_script([*LAUNCH, *args])
    assert done.status == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("hvdprun: ")
    assert hint in done.stderr


def test_help_names_the_flags() -> None:
    done = run_script([*LAUNCH, "--help"])
    assert done.status == 0
    assert "-np" in done.stdout
    assert "--output-filename" in done.stdout


def test_ranks_are_told_their_place(start) -> None:
    args = ["-np", "2", "--", sys.executable, "-c", PRINT_ENV]
    outer = {"PMI_RANK": "7", "OMPI_COMM_WORLD_RANK": "5", "PMI_FD": "9"}
    first, second = _environments(start(args=args, env=outer))
    for rank, env in enumerate((first, second)):
        told = {name: env[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
        assert told == {"RANK": str(rank), "SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "2"}
        assert (env["HOROVOD_CROSS_RANK"], env["HOROVOD_CROSS_SIZE"]) == ("0", "1")
        assert len(env["HVDP_SECRET"]) == 64
        assert env["PYTHONUNBUFFERED"] == "1"
        assert not {"PMI_RANK", "PMI_FD", "OMPI_COMM_WORLD_RANK"} & env.keys()
    assert first["HVDP_ADDRESS"] == second["HVDP_ADDRESS"]
    assert first["HVDP_ADDRESS"].startswith("unix:hvdp-")


def test_settings_become_variables(start) -> None:
    flags = ["--fusion-threshold-mb", "2", "--log-level", "debug", "--start-timeout", "9"]
    flags += ["--cache-capacity", "7", "--timeline-filename", "t.json", "--no-stall-check"]
    flags += ["--stall-check-warning-time-seconds", "5", "--stall-check-shutdown-time-seconds", "6"]
    (env,) = _environments(start(args=["-np", "1", *flags, sys.executable, "-c", PRINT_ENV]))
    assert env["HOROVOD_FUSION_THRESHOLD"] == str(2 << 20)
    assert env["HOROVOD_LOG_LEVEL"] == "DEBUG"
    assert env["HOROVOD_START_TIMEOUT"] == "9"
    assert env["HOROVOD_CACHE_CAPACITY"] == "7"
    assert env["HOROVOD_TIMELINE"] == "t.json"
    assert env["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    assert env["HOROVOD_STALL_CHECK_TIME_SECONDS"] == "5"
    assert env["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "6"


def test_flags_without_a_meaning_are_named_once(start) -> None:
    flags = ["--cycle-time-ms", "1", "--autotune", "--num-nccl-streams", "2"]
    running = start(args=["-np", "1", *flags, "true"])
    assert running.end() == 0
    assert len(running.err) == 1
    assert "--cycle-time-ms, --autotune, --num-nccl-streams" in running.err[0]


def test_cores_are_shared(start, how) -> None:
    args = [*how, "-np", "2", sys.executable, "-c", PRINT_ENV]
    environments = _environments(start(args=args, env={"OMP_NUM_THREADS": ""}))
    assert [env["OMP_NUM_THREADS"] for env in environments] == [str(share(usable_cores(), 2))] * 2
    environments = _environments(start(args=args, env={"OMP_NUM_THREADS": "3"}))
    assert [env["OMP_NUM_THREADS"] for env in environments] == ["3", "3"]


def test_more_ranks_than_cores_is_a_hint(start) -> None:
    ranks = usable_cores() + 1
    running = start(args=["-np", str(ranks), "true"])
    assert running.end() == 0
    assert len(running.err) == 1
    assert running.err[0].startswith("hvdprun: hint: ")


def test_own_hosts_need_no_mpi(start, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# all here\nlocalhost slots=1\n127.0.0.1 slots=1\n")
    for args in (["-H", "localhost:2"], ["--hostfile", str(hostfile)], ["-np", "2", "-H", "localhost:4"]):
        running = start(args=[*args, sys.executable, "-c", "import os; print(os.environ['HOROVOD_SIZE'])"])
        assert running.end() == 0, running.err
        assert sorted(running.out) == ["[0]<stdout>:2", "[1]<stdout>:2"]


def test_arguments_pass_no_shell(start, how) -> None:
    words = ["a b", "$HOME", "*", "'", '"', ";", "é", "--np", ""]
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    running = start(args=[*how, "-np", "1", sys.executable, "-c", program, *words])
    assert running.end() == 0
    assert json.loads(running.out[0].partition(">:")[2]) == words


def test_command_keeps_its_own_flags() -> None:
    options = parse(["-np", "2", "python", "train.py", "--verbose", "-np", "3"], "hvdprun")
    assert (options.num_proc, options.verbose) == (2, False)
    assert options.command == ["python", "train.py", "--verbose", "-np", "3"]


def test_the_launcher_loads_no_framework() -> None:
    frameworks = {"torch", "keras", "jax", "tensorflow", "mpi4py"}
    program = f"import sys, hvdp.launch.cli; print({frameworks} & set(sys.modules))"
    assert run_script([sys.executable, "-c", program]).stdout == "set()\n"


def test_without_mpiexec_it_says_what_to_install(tmp_path: Path) -> None:
    if (Path(sys.executable).parent / "mpiexec").exists():
        # Beside this Python there is one: use a Python that has none.
        for name in ("python", "true"):
            os.symlink(
                shutil.which(name) if name == "true" else os.path.realpath(sys.executable), tmp_path / name
            )
        env = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [str(tmp_path / "python"), "-m", "hvdp.launch"]
    else:
        env, command = {**os.environ, "PATH": "/nonexistent"}, LAUNCH
    done = subprocess.run([*command, "-np", "2", "--mpi", "true"], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'hvdp[mpich]'" in done.stderr
