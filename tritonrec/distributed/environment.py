"""Which rank this process is, by the variables of torchrun, SLURM or MPI, and where the ranks meet."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import warnings
import zlib
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from typing import NamedTuple

from .limits import within


class Launcher(NamedTuple):
    """The variables in which a launcher says rank and number of its processes; empty: it does not."""

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""


LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Launcher("SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    Launcher("SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    Launcher("SLURM", "SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID"),
    Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    Launcher("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    Launcher("PMIx", "PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
)  # fmt: skip
"""The first one that says this process's rank is believed: torchrun runs under srun, mpirun under sbatch."""

OF_JOBS = "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_LOCALID", "FLUX_JOB_SIZE"
"""That a job's script has too, which is no rank."""

JOB_NAMES = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "FLUX_JOB_ID", "PMI_PORT")
"""Variables that the processes of one job have in common and other jobs do not: a port follows from them."""

FIRST_PORT, PORTS = 20_000, 10_000
"""Ports of jobs, below those that Linux gives to connections."""

RESOLVE_TIMEOUT = timedelta(seconds=5)
"""Limit of the look-up of a host's name."""


class Here(NamedTuple):
    """This process among the ranks: its number, their number, the launcher that said so, and its number on
    this machine; None where the launcher does not say it.
    """

    rank: int = 0
    world_size: int = 1
    launcher: str = ""
    local_rank: int | None = None


def rank_here(environment: Mapping[str, str] | None = None) -> Here:
    """This process's rank by its launcher's variables; ``Here()`` where it was started alone.

    Raises ValueError for variables that are no numbers, do not fit together, or of which one is missing.
    """
    given = os.environ if environment is None else environment
    if "WORLD_SIZE" in given and "RANK" not in given:
        if (size := _number(given, "WORLD_SIZE", 1)) > 1:
            raise ValueError(
                f"WORLD_SIZE={size} is set and RANK is not: set both, as torchrun does, or neither"
            )
        _warn_of_others(given)
        return Here()
    known = [each for each in LAUNCHERS if each.rank in given]
    if not known:
        for each in LAUNCHERS:
            for name, alone in ((each.size, "1"), (each.local_rank, "0")):
                if name not in OF_JOBS and given.get(name, alone).strip() not in (alone, ""):
                    raise ValueError(
                        f"{name}={given[name]} is set and {each.rank} is not, so this process's rank is "
                        f"unknown: set RANK and WORLD_SIZE, as torchrun does, or unset {name} for a run of "
                        "one process"
                    )
        return Here()
    launcher = next((each for each in known if each.size in given), None)
    if launcher is None:
        sizes = " or ".join(dict.fromkeys(each.size for each in known))
        raise ValueError(
            f"{known[0].rank}={given[known[0].rank]} is set and {sizes} is not, so the number of ranks is "
            "unknown: set RANK and WORLD_SIZE, as torchrun does, or unset it for a run of one process"
        )
    size, rank = _number(given, launcher.size, 1), _number(given, launcher.rank)
    for other in known if size > 1 and "TORCHELASTIC_RUN_ID" not in given else ():  # torchrun numbers anew
        told = given.get(other.size, "").strip()
        if told == str(size) and _number(given, other.rank) != rank:
            raise ValueError(
                f"{launcher.rank}={rank} and {other.rank}={given[other.rank]} disagree, of "
                f"{launcher.size}={size} and {other.size}={told}: two processes may take one rank. Unset "
                f"those of {launcher.name} or of {other.name}"
            )
    if rank >= size:
        raise ValueError(f"{launcher.rank}={rank} is not below {launcher.size}={size}")
    local = None
    if launcher.local_rank in given:
        local = _number(given, launcher.local_rank)
        says = launcher.local_size in given
        local_size = min(size, _number(given, launcher.local_size, 1) if says else size)
        if local > rank or local >= local_size:
            raise ValueError(
                f"{launcher.local_rank}={local} does not fit {launcher.rank}={rank} of "
                f"{launcher.size}={size}: a rank's number on its machine is at most its number among all, "
                f"and below the {local_size} ranks there"
            )
    if size == 1:
        _warn_of_others(given)
    return Here(rank, size, launcher.name, local)


def _warn_of_others(given: Mapping[str, str]) -> None:
    """This process is told to be alone: say so where another launcher has started more beside it."""
    for each in LAUNCHERS:
        rank, size = given.get(each.rank, ""), given.get(each.size, "")
        if rank.isdigit() and size.isdigit() and int(size) > 1:
            warnings.warn(
                f"WORLD_SIZE=1 makes this process rank 0 of 1, and {each.name} has started {size} "
                f"({each.rank}={rank}), each of which trains alone: unset RANK and WORLD_SIZE for ranks that "
                "train together",
                UserWarning,
                stacklevel=3,
            )
            return


def settle(environment: MutableMapping[str, str] | None = None) -> Here:
    """`rank_here`, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set for it where there are more ranks.

    Under another launcher than torchrun, MASTER_ADDR is the first machine of SLURM's list, or this machine
    where all ranks are here; MASTER_PORT follows from the job's number. Those that are set stay.

    Raises ValueError where rank 0's machine or a port cannot be known, and as `rank_here`.
    """
    given = os.environ if environment is None else environment
    here = rank_here(given)
    if here.world_size == 1:
        return here
    found = {
        "RANK": str(here.rank),
        "WORLD_SIZE": str(here.world_size),
        "MASTER_ADDR": given.get("MASTER_ADDR") or _address(given, here),
        "MASTER_PORT": given.get("MASTER_PORT") or _port(given, here),
    }
    _number(found, "MASTER_PORT", 1, 65_535)
    given.update(found)
    return here


def check_address(address: str, timeout: timedelta) -> None:
    """Raise ValueError where nobody knows a machine of this name, within `timeout` or five seconds."""
    try:
        within(min(timeout, RESOLVE_TIMEOUT), lambda: socket.getaddrinfo(address, None))
    except (OSError, UnicodeError) as error:  # TimeoutError among them
        raise ValueError(
            f"MASTER_ADDR={address} is no machine that this one knows ({error}): give the name or the "
            "address of rank 0's machine"
        ) from error


def is_loopback(address: str) -> bool:
    """Whether an address is the loopback interface's everywhere; a machine's name may be so there alone."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _number(given: Mapping[str, str], name: str, least: int = 0, most: int | None = None) -> int:
    text = given[name].strip()
    number = int(text) if re.fullmatch(r"[+-]?\d{1,9}", text, re.ASCII) else None
    if number is None or number < least or (most is not None and number > most):
        limits = f"{least} or more" if most is None else f"in {least} to {most}"
        raise ValueError(f"{name}={given[name]!r} must be a whole number, {limits}")
    return number


def _address(given: Mapping[str, str], here: Here) -> str:
    """Rank 0's machine."""
    if here.launcher == "torchrun":
        raise ValueError(
            f"RANK={here.rank} and WORLD_SIZE={here.world_size} are set and MASTER_ADDR is not: set it to "
            "rank 0's machine, and MASTER_PORT to a free port there, or start the ranks with torchrun"
        )
    for launcher in LAUNCHERS:
        local = launcher.local_size
        if launcher.name == here.launcher and given.get(local) == str(here.world_size):
            return "127.0.0.1"
    if given.get("SLURM_STEP_NUM_NODES", given.get("SLURM_NNODES")) == "1":
        return "127.0.0.1"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):  # mpirun under sbatch too
        if given.get(name):
            return first_machine(given[name])
    raise ValueError(
        f"{here.launcher} started rank {here.rank} of {here.world_size}, and its variables do not say where "
        "rank 0 is: set MASTER_ADDR to its machine (127.0.0.1 where all ranks are on one) and MASTER_PORT "
        "to a free port there, the same for all ranks"
    )


def _port(given: Mapping[str, str], here: Here) -> str:
    """A port that the ranks of this job choose alike."""
    name = next((each for each in JOB_NAMES if given.get(each)), None)
    if here.launcher == "torchrun" or name is None:
        raise ValueError(
            f"rank {here.rank} of {here.world_size} has MASTER_ADDR and no MASTER_PORT: set it to a free "
            "port of rank 0's machine, the same for all ranks"
        )
    # All ranks find the same port without a message.
    # Two steps of a job, as a rule, find two ports.
    job = f"{given[name]} {given.get('SLURM_STEP_ID', '')}"
    return str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)


def first_machine(listed: str) -> str:
    """The first machine of a list as SLURM writes it: ``node[03-07,12],other`` begins with node03."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", listed.strip())
    if match is None:
        raise ValueError(f"SLURM's list of machines {listed!r} names none: set MASTER_ADDR and MASTER_PORT")
    return "".join(part or "" for part in match.groups())
