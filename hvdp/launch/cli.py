"""`horovodrun`, `hvdprun` and `python -m hvdp.launch`."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdp._core.config import environment
from hvdp._version import __version__
from hvdp.errors import LaunchError
from hvdp.launch import check_build, cores
from hvdp.launch.arguments import EXAMPLE, Options, parse
from hvdp.launch.blame import exit_code
from hvdp.launch.console import Console
from hvdp.launch.direct import Children
from hvdp.launch.guardian import MARK, Guardian, adopt_orphans, reap_orphans, remove_files
from hvdp.launch.hosts import Host, is_here, parse_hostfile, parse_hosts, place_ranks
from hvdp.launch.job import Job, Starter
from hvdp.launch.loop import Loop
from hvdp.launch.mpiexec import find, without_outer
from hvdp.launch.output import Output
from hvdp.launch.relays import Relays, relayed

__all__ = ["main"]

_USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher; returns the exit status of the job's first failing rank, or 0."""
    program = Path(sys.argv[0]).name
    program = program if program in ("horovodrun", "hvdprun") else "hvdprun"
    console = Console(program)
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments, program)
        if options.version:
            console.write(1, f"{__version__}\n".encode())
            return 0
        if options.check_build:
            console.write(1, check_build.report(environment()).encode())
            return 0
        return _run(options, console, environment())
    except LaunchError as error:
        console.say(str(error))
        return _USAGE_ERROR
    except KeyboardInterrupt:
        # Before the first rank was started; from then on the job takes the signals.
        return exit_code(-signal.SIGINT)


def _run(options: Options, console: Console, env: Mapping[str, str]) -> int:
    hosts, size = _where(options)
    _check_command(options.command, env)
    if options.ignored:
        console.say(f"ignored, for hvdp has nothing they would steer: {', '.join(options.ignored)}")
    if options.mpi and options.gloo:
        raise LaunchError("--mpi and --gloo contradict each other: leave one out")
    here = all(is_here(host) for host in hosts)
    if options.gloo and not here:
        raise LaunchError("--gloo runs on this host only; other hosts are reached through MPI: leave it out")
    job = secrets.token_hex(16)
    variables = {**without_outer(env), **options.variables(), MARK: job}
    variables.setdefault("PYTHONUNBUFFERED", "1")
    _share_cores(variables, max((h.slots for h in hosts), default=size), size, here, options, console)
    starter: Starter
    if options.mpi or not here:
        # Inside an allocation of several hosts the MPI may put ranks where no relay reaches us.
        local = here and int(env.get("SLURM_JOB_NUM_NODES", "1") or 1) <= 1
        mpiexec = find(env)
        command = mpiexec.command(
            size,
            relayed(options.command, job if local else None),
            hosts,
            variables,
            extra=options.mpi_args,
        )
        if options.verbose:
            console.say(f"MPI {mpiexec.dialect} {mpiexec.version}: {shlex.join(command)}")
        starter = Relays(size, command, variables, job if local else None)
    else:
        if options.verbose:
            console.say(f"starting {size} processes on this host: {shlex.join(options.command)}")
        starter = Children(size, options.command, _RankEnvironment(variables, size, job))
    began = time.time()
    adopt_orphans()
    with Loop() as loop:
        supervised = Job(size, job, loop, console, Guardian(job), starter)
        directory, timestamps = options.output_filename, options.timestamps
        try:
            output = Output(loop, console, size, supervised.output_closed, directory, timestamps)
            status = supervised.run(output)
        finally:
            reap_orphans()
    # Also after success: ranks that caught a peer's failure end well without finalising MPI.
    remove_files(began)
    return status


def _where(options: Options) -> tuple[list[Host], int]:
    """The hosts asked for, if any, and the number of ranks."""
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError("-H and --hostfile both say where to run: leave one out")
    hosts: list[Host] = []
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        hosts = parse_hostfile(options.hostfile)
    if options.num_proc is None:
        if not hosts:
            raise LaunchError(f"say how many processes to start with -np, for example: {EXAMPLE}")
        return hosts, sum(host.slots for host in hosts)
    return place_ranks(hosts, options.num_proc) if hosts else [], options.num_proc


def _check_command(command: Sequence[str], env: Mapping[str, str]) -> None:
    if not command:
        raise LaunchError(f"say what to run after the flags, for example: {EXAMPLE}")
    program = command[0]
    if shutil.which(program, path=env.get("PATH")) is not None:
        return
    if program.endswith(".py"):
        raise LaunchError(
            f"{program} is not a program: put python before it, as in hvdprun -np 2 python {program}"
        )
    if os.path.exists(program) and os.sep in program:
        raise LaunchError(f"{program} cannot be executed: make it executable or name its interpreter first")
    raise LaunchError(f"there is no command {program!r}: check its spelling, or give its path")


def _share_cores(
    variables: dict[str, str], local: int, size: int, here: bool, options: Options, console: Console
) -> None:
    """Keep the ranks' thread pools from fighting over this host's cores."""
    usable = cores.usable_cores()
    if here and size > usable:
        console.say(f"hint: {size} ranks share {usable} cores; expect them to run slower")
    if not variables.get("OMP_NUM_THREADS"):
        variables["OMP_NUM_THREADS"] = str(cores.share(usable, size if here else local))
        if options.verbose:
            console.say(f"OMP_NUM_THREADS={variables['OMP_NUM_THREADS']} for each rank, of {usable} cores")


class _RankEnvironment:
    """Makes the environment of each rank that this launcher starts itself."""

    def __init__(self, variables: Mapping[str, str], size: int, job: str) -> None:
        self._common = {
            **variables,
            "HOROVOD_SIZE": str(size),
            "HOROVOD_LOCAL_SIZE": str(size),
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "HVDP_ADDRESS": f"unix:hvdp-{job}",
            "HVDP_SECRET": secrets.token_hex(32),
        }

    def __call__(self, rank: int, pipe: int) -> Mapping[str, str]:
        return {
            **self._common,
            "HOROVOD_RANK": str(rank),
            "HOROVOD_LOCAL_RANK": str(rank),
            "HVDP_SUPERVISOR_FD": str(pipe),
            "HVDP_SUPERVISOR_INODE": str(os.fstat(pipe).st_ino),
        }
