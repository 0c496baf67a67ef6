"""Ranks that a launcher has started join each other: torchrun's, SLURM's or MPI's."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from .communicator import PEER_FAILURE, TIMEOUT
from .environment import Here, check_address, is_loopback, rank_here, settle
from .groups import Communicators, validate_division
from .limits import LATE, within
from .stores import LOOPBACK, connect_to, loopback_interface, serve_store
from .watch import RankDiedError, Watch

Result = TypeVar("Result")
_JOINS = itertools.count()


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
    watch = join_environment(timeout)
    try:
        communicators = made_within(
            timeout,
            lambda: Communicators.over(range(world_size), timeout, replicas, backend, watch, nodes),
            watch,
        )
        assert communicators is not None
        yield communicators
    except BaseException as error:
        watch.fail(error)
        watch.linger()
        raise
    finally:
        watch.close()
        dist.destroy_process_group()


def join_environment(timeout: timedelta) -> Watch:
    """Create the default process group of the ranks of this process's variables; returns their watch.

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

    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def connect() -> dist.Store:
        return connect_to(address, port, timeout)

    def come() -> tuple[dist.Store, Watch]:
        at = (LOOPBACK if address == "localhost" else address) if local else None
        serves = here.rank == 0 and not by_agent
        # An agent's store outlives its workers, and the groups that they make one after another.
        name = f"tritonrec {os.environ.get('TORCHELASTIC_RESTART_COUNT')} {next(_JOINS)}"
        store = dist.PrefixStore(name, serve_store(at, port, timeout, address) if serves else connect())
        _come(store, here)
        # Reports have a connection of their own: the other one may wait for an answer.
        reports = dist.PrefixStore(name, connect())
        return store, Watch(reports, here.rank, here.world_size, timeout, server=None if by_agent else 0)

    started = {"SLURM": " (a script of sbatch starts its ranks with srun)"}.get(here.launcher, "")
    place = f"at {address}:{port}{started}"
    try:
        store, watch = within(timeout + timedelta(seconds=LATE), come)
    except (dist.DistError, TimeoutError) as error:
        server = "the agent of torchrun" if by_agent else "rank 0"
        raise RankDiedError(
            f"rank {here.rank} of {here.world_size}: {server} did not answer {place} within "
            f"{timeout.total_seconds():g} s: {error}"
        ) from error

    def join() -> None:
        dist.init_process_group(
            "gloo", store=store, rank=here.rank, world_size=here.world_size, timeout=timeout
        )

    try:
        made_within(timeout, join, watch, f"joining {place}")
    except BaseException:
        watch.close()
        raise
    return watch


def _come(store: dist.Store, here: Here) -> None:
    """Say that this rank is here, and how many ranks it is of; ValueError where another process differs."""
    if store.add(f"processes of rank {here.rank}", 1) > 1:
        raise ValueError(
            f"another process is rank {here.rank} of these {here.world_size} too: give each one its own RANK"
        )
    # Of the rank that came first: nobody waits here for another one.
    ranks = int(store.compare_set("ranks", "", str(here.world_size)))
    if ranks != here.world_size:
        raise ValueError(
            f"WORLD_SIZE={here.world_size} here and {ranks} at another rank: give every rank the same"
        )


def made_within(
    timeout: timedelta, make: Callable[[], Result], watch: Watch, stage: str = "making of groups"
) -> Result:
    """``make()``, a rendezvous; `RankDiedError` names the rank that does not come, or gives no answer."""
    began, number = time.monotonic(), watch.begin_call("rendezvous")
    with watch.doing(stage):
        try:
            return within(timeout + timedelta(seconds=LATE), make)
        except (RuntimeError, TimeoutError) as error:
            of_peer = isinstance(error, (dist.DistError, TimeoutError)) or PEER_FAILURE.search(str(error))
            if isinstance(error, RankDiedError) or not of_peer:
                raise
            waited, ranks = time.monotonic() - began, range(watch.world_size)
            raise watch.explain("rendezvous", number, ranks, waited, error) from error
