"""Ranks that a launcher has started join each other: torchrun's, SLURM's or MPI's."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from .communicator import PEER_FAILURE, TIMEOUT
from .environment import Here, check_address, is_loopback, rank_here, settle
from .groups import Communicators, validate_division
from .limits import LATE, READ_TIMEOUT, within
from .reports import MAX_SHOWN
from .stores import LOOPBACK, loopback_interface, serve_store
from .watch import RankDiedError

Result = TypeVar("Result")


@contextmanager
def from_environment(timeout: timedelta = TIMEOUT, replicas: int = 1, backend: str = "gloo", nodes: int = 1):
    """Yield this process's `Communicators` by the variables of torchrun, SLURM or MPI (`environment`).

    `replicas` ranks own the same shard of the tables; they divide the world size. `backend` and `nodes` as in
    `Communicators.over`.

    Without these variables, or with one rank, the communicators are local. The process groups are destroyed
    at the end, also after an error. Raises `RankDiedError` where not all ranks join within the timeout,
    ValueError for variables that do not fit together, an unknown machine, or a port that is in use.
    """
    world_size = rank_here().world_size
    validate_division(world_size, replicas, nodes)
    if world_size == 1:
        yield Communicators.local()
        return
    join_environment(timeout)
    try:
        communicators = made_within(
            timeout, lambda: Communicators.over(range(world_size), timeout, replicas, backend, nodes=nodes)
        )
        assert communicators is not None
        try:
            yield communicators
        except BaseException as error:
            communicators.watch.fail(error)
            raise
        finally:
            communicators.watch.close()
    finally:
        dist.destroy_process_group()


def join_environment(timeout: timedelta) -> None:
    """Create the default process group of the ranks of this process's variables.

    Where MASTER_ADDR is this machine's loopback interface, nothing listens on another one.

    Raises `RankDiedError` where not all ranks join within the timeout, and ValueError as `from_environment`.
    """
    if dist.is_initialized():
        raise ValueError(
            "this process has joined a default process group already: make the ranks' groups over it with "
            "Communicators.over(range(dist.get_world_size()))"
        )
    here = settle()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    check_address(address, timeout)
    local = is_loopback(address)
    if local and (name := loopback_interface()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)

    stores: list[dist.Store] = []

    def join() -> None:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            dist.init_process_group("gloo", timeout=timeout)
            return
        if here.rank == 0:
            at = (LOOPBACK if address == "localhost" else address) if local else None
            store = serve_store(at, port, timeout, address)
        else:
            store = dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False)
        stores.append(store)
        _come(store, here)
        dist.init_process_group(
            "gloo", store=store, rank=here.rank, world_size=here.world_size, timeout=timeout
        )

    try:
        within(timeout + timedelta(seconds=LATE), join)
    except (dist.DistError, TimeoutError) as error:
        missing = _missing(stores[0], here) if stores else ""
        started = {"SLURM": " (a script of sbatch starts its ranks with srun)"}.get(here.launcher, "")
        raise RankDiedError(
            f"rank {here.rank}: not all of the {here.world_size} ranks joined at {address}:{port} within "
            f"{timeout.total_seconds():g} s{missing}; look for a rank that has printed nothing{started}: "
            f"{error}"
        ) from error


def _come(store: dist.Store, here: Here) -> None:
    """Say that this rank is here, and how many ranks it is of; ValueError where another process differs."""
    if store.add(f"processes of rank {here.rank}", 1) > 1:
        raise ValueError(
            f"another process is rank {here.rank} of these {here.world_size} too: give each one its own RANK"
        )
    if here.rank == 0:
        store.set("ranks", str(here.world_size))
    elif (ranks := int(store.get("ranks"))) != here.world_size:
        raise ValueError(f"WORLD_SIZE={here.world_size} here and {ranks} at rank 0: give every rank the same")


def _missing(store: dist.Store, here: Here) -> str:
    """The ranks that have not come, in words; empty where all have, or the store does not answer."""
    every = range(here.world_size)
    try:
        missing = within(
            READ_TIMEOUT, lambda: [each for each in every if not store.check([f"processes of rank {each}"])]
        )
    except (RuntimeError, TimeoutError):
        return ""
    return (
        f", {len(missing)} have not come: rank {', '.join(map(str, missing[:MAX_SHOWN]))}" if missing else ""
    )


def made_within(timeout: timedelta, make: Callable[[], Result]) -> Result:
    """``make()``, which makes groups; `RankDiedError` where the store or a rank gives no answer meanwhile."""
    try:
        return within(timeout + timedelta(seconds=LATE), make)
    except (RuntimeError, TimeoutError) as error:
        of_peer = isinstance(error, (dist.DistError, TimeoutError)) or PEER_FAILURE.search(str(error))
        if isinstance(error, RankDiedError) or not of_peer:
            raise
        raise RankDiedError(
            f"not all ranks made their groups within {timeout.total_seconds():g} s; look for one that stands "
            f"still, rank 0 first, which may serve the others' store: {error}"
        ) from error
