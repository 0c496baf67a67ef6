"""The collectives of `tritonrec serve-bench` beside MPI: ``mpiexec -n W python -m ... OUT ...``.

gloo and bls run in the ranks that mpiexec started, alternating with `MPI_Alltoallv`. Rank 0 prints a line for
every size done, and writes the list of rounds to OUT as JSON: per round and size, seconds by backend.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from ...distributed import TIMEOUT
from ...distributed.signals import end_with_parent
from ...files import ScratchFolder
from ..network import INTERFACE, Network

Cells = dict[int, dict[str, list[float]]]
"""By size or number of repetitions, and backend: seconds on every rank."""


def mpiexec() -> str | None:
    """The launcher beside this interpreter, where the package mpich puts it, or on the path."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def available() -> bool:
    """Whether mpi4py and mpiexec are here."""
    return find_spec("mpi4py") is not None and mpiexec() is not None


def run_with_mpi(
    world_size: int,
    rounds: int,
    seed: int,
    sizes: list[int],
    most: int,
    advance: Callable[[], None],
    network: Network | None = None,
) -> tuple[list[Cells], list[Cells]]:
    """Per round and size, and per round and number of repetitions, each backend's seconds on every rank.

    `most` repetitions, none with 0; on the hosts of a `network`. Raises RuntimeError where mpiexec fails.
    """
    with ScratchFolder() as directory:
        out = Path(directory) / "out.json"
        words = [out, rounds, seed, ",".join(map(str, sizes)), most]
        rank = [sys.executable, "-W", "ignore", "-m", __name__, *map(str, words)]
        command = ["-n", str(world_size), *rank]
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE if network else "lo"}
        if network:  # a program for each host, and no memory that MPI finds them to share
            hosts = [
                ["-n", "1", "ip", "netns", "exec", network.namespace_of(at), *rank]
                for at in range(world_size)
            ]
            command = [word for host in hosts for word in (":", *host)][1:]
            own |= {"MPIR_CVAR_NOLOCAL": "1", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": INTERFACE}
            own |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE}
        process = subprocess.Popen(
            [mpiexec() or "mpiexec", *command],
            stdout=subprocess.PIPE,
            env={**os.environ, **own},
            text=True,
            preexec_fn=end_with_parent,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("done"):
                advance()
        if process.wait() != 0 or not out.exists():
            raise RuntimeError(f"mpiexec ended with status {process.returncode}; --no-mpi leaves MPI out")
        found = json.loads(out.read_text())
        by_size, by_count = (
            [{int(key): cell for key, cell in each.items()} for each in part] for part in found
        )
        return by_size, by_count


def main(out: str, rounds: str, seed: str, sizes: str, most: str) -> None:
    """A rank."""
    from mpi4py import MPI

    from .collectives import (
        REPEATED_BYTES,
        bls_group,
        counts_of_ranks,
        of_ranks,
        time_collectives,
        time_repetitions,
    )

    torch.set_num_threads(1)
    peer = MPI.COMM_WORLD
    each = [int(size) for size in sizes.split(",") if size]
    capacity = max([REPEATED_BYTES, *each])
    store = f"file://{out}.store"
    dist.init_process_group("gloo", init_method=store, rank=peer.rank, world_size=peer.size)
    try:
        found: tuple[list[Cells], list[Cells]] = ([], [])
        for turn in range(int(rounds)):
            cells: Cells = {}
            for size in each:
                own = time_collectives(size, int(seed) + turn, peer, capacity=capacity)
                cells[size] = of_ranks(peer.allgather(own))
                if peer.rank == 0:
                    print("done", turn, size, flush=True)
            found[0].append(cells)
            repeated = time_repetitions(int(most), int(seed) + turn, peer, capacity=capacity)
            found[1].append(counts_of_ranks(peer.allgather(repeated)))
        if peer.rank == 0:
            Path(out).write_text(json.dumps(found))
            by = bls_group(TIMEOUT).exchange.transport, bls_group(TIMEOUT, capacity).exchange.transport
            print(f"bls by {by[0]}, with a capacity by {by[1]}", file=sys.stderr, flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
