"""Finding one's place from each launcher's variables."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvdp.errors import RendezvousError
from hvdp.launch.environments import detect

HVDPRUN = {
    "HVDP_ADDRESS": "unix:hvdp-abc",
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HVDP_SECRET": "00ff",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4321",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node-7@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_JOB_ID": "77",
}
ALL = {
    "hvdprun": HVDPRUN,
    "horovodrun": HOROVODRUN,
    "torchrun": TORCHRUN,
    "Open MPI": OPENMPI,
    "mpiexec": HYDRA,
    "srun": SLURM,
}


@pytest.mark.parametrize("launcher", ALL)
def test_place_on_one_host(launcher: str) -> None:
    place = detect(ALL[launcher])
    assert (place.rank, place.size, place.launcher) == (1, 2, launcher)
    assert place.address.startswith("unix:hvdp-")
    assert len(place.address) < 100
    assert detect(ALL[launcher]).address == place.address


def test_nobody_started_us() -> None:
    place = detect({"PATH": "/bin"})
    assert (place.rank, place.size, place.launcher, place.address) == (0, 1, "none", "")


def test_our_launcher_wins_and_alone_hands_out_a_secret() -> None:
    place = detect({**SLURM, **HYDRA, **OPENMPI, **TORCHRUN, **HVDPRUN})
    assert (place.launcher, place.address, place.secret) == ("hvdprun", "unix:hvdp-abc", b"\x00\xff")
    assert detect({**HYDRA, "HVDP_SECRET": "00ff"}).secret == b""


@pytest.mark.parametrize(
    ("env", "address"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "4"}, "tcp:node1:29501"),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4"}, "mpi"),
        ({**HYDRA, "PMI_SIZE": "4"}, "mpi"),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "2"}, "mpi"),
    ],
)
def test_meeting_point_between_hosts(env: dict[str, str], address: str) -> None:
    assert detect(env).address == address


@pytest.mark.parametrize(
    ("env", "other"),
    [
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        (TORCHRUN, {"MASTER_PORT": "29600"}),
        (TORCHRUN, {"TORCHELASTIC_RUN_ID": "x" * 200}),
        (OPENMPI, {"PMIX_NAMESPACE": "prterun-node-8@1"}),
        (HOROVODRUN, {"HOROVOD_GLOO_RENDEZVOUS_PORT": "4322"}),
        (SLURM, {"SLURM_STEP_ID": "1"}),
    ],
)
def test_two_jobs_never_meet(env: dict[str, str], other: dict[str, str]) -> None:
    assert detect(env).address != detect({**env, **other}).address
    assert len(detect({**env, **other}).address) < 100


def test_a_batch_script_is_no_rank() -> None:
    assert detect({"SLURM_PROCID": "0", "SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}).size == 1


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({**HVDPRUN, "HOROVOD_RANK": "one"}, "HOROVOD_RANK='one'"),
        ({**HVDPRUN, "HOROVOD_RANK": "2"}, "HOROVOD_RANK=2"),
        ({"HVDP_ADDRESS": "unix:hvdp-abc"}, "HOROVOD_RANK is not set"),
        ({**HVDPRUN, "HVDP_SECRET": "xyz"}, "HVDP_SECRET"),
        ({**HOROVODRUN, "HOROVOD_LOCAL_SIZE": "1"}, "HOROVOD_LOCAL_SIZE=1"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        ({**TORCHRUN, "MASTER_PORT": "-1"}, "MASTER_PORT='-1'"),
        ({**TORCHRUN, "WORLD_SIZE": "4", "MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "0"}, "OMPI_COMM_WORLD_SIZE='0'"),
        ({**HYDRA, "PMI_SIZE": "1.5"}, "PMI_SIZE='1.5'"),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "many"}, "SLURM_STEP_NUM_NODES='many'"),
    ],
)
def test_contradictions_name_the_variable(env: dict[str, str], name: str) -> None:
    with pytest.raises(RendezvousError, match="Received: ") as caught:
        detect(env)
    assert name in str(caught.value)


def test_supervisor_pipe_only_if_it_still_is_that_pipe() -> None:
    r, w = os.pipe()
    try:
        told = {**HVDPRUN, "HVDP_SUPERVISOR_FD": str(w), "HVDP_SUPERVISOR_INODE": str(os.fstat(w).st_ino)}
        assert detect(told).supervisor_fd == w
        assert detect({**told, "HVDP_SUPERVISOR_INODE": "1"}).supervisor_fd is None
        assert detect({**told, "HVDP_SUPERVISOR_FD": "999"}).supervisor_fd is None
        assert detect({**told, "HVDP_SUPERVISOR_FD": "x"}).supervisor_fd is None
        with open(os.devnull, "w") as other:
            assert detect({**told, "HVDP_SUPERVISOR_FD": str(other.fileno())}).supervisor_fd is None
    finally:
        os.close(r)
        os.close(w)
    assert detect(HVDPRUN).supervisor_fd is None


def test_ancestor_rule_sees_through_a_wrapping_shell() -> None:
    program = "import os; from hvdp.launch.environments import detect; print(detect(os.environ).address)"
    env = {**os.environ, **HYDRA}
    direct = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    wrapped = subprocess.run(
        ["sh", "-c", f"{sys.executable} -c '{program}'; true"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert direct.stdout == wrapped.stdout
    assert direct.stdout.startswith(f"unix:hvdp-mpiexec-{os.getpid()}-")
