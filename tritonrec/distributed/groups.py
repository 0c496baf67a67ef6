"""The process groups of a run, one for each lane that communicates.

Each lane issues its collectives in the schedule's order, which is the same on all ranks. Collectives of
different lanes need no common order.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..settings import no_copy
from .agreement import check_ranks_agree
from .communicator import SAVE_TIMEOUT, TIMEOUT, Communicator
from .limits import within
from .machine import count_machines, machine
from .stores import connect_to
from .watch import Watch

CONNECT_TIMEOUT = timedelta(seconds=10)
"""Timeout of the connection to the store that torchrun's variables name."""


@dataclass(frozen=True)
class Communicators:
    """One communicator for each lane that communicates, `control` for the caller's thread, and `checkpoint`
    for the saver's.

    The caller's thread runs beside the lanes and needs a group of its own: on a lane's group its collectives
    would come before the lane's on one rank and after them on another.

    With G replicas of the tables (2D sparse parallelism) the T ranks form G sharding groups of L = T / G
    ranks, which own one shard each of all tables, and L replica groups, whose ranks own the same shard: a
    mesh of L rows and G columns. T = 8, G = 2::

                      sharding group 0   sharding group 1
        replicas 0                   0                  1
        replicas 1                   2                  3       rank r owns shard r // G
        replicas 2                   4                  5
        replicas 3                   6                  7

    With H nodes of L ranks each, lookups go in two steps (`tritonrec.pipeline.relays`): within the node, and
    over the *rail* of the ranks that have one number in their nodes. T = 4, H = 2::

                      rail 0   rail 1
        node 0             0        1
        node 1             2        3       rank r is rank r % L of node r // L

    Args:
        routing, retrieval, communication, checkpoint, shard_control: over this rank's sharding group.
        replica_routing, replica: over its replica group.
        node_routing, node: over its node. rail_routing, rail: over its rail. Of one rank without nodes.
        reduce, control: over all ranks.
        stop: set on a rank that has to stop after its step; ranks may see it at different steps, see
            `Trainer.stopping`.
        watch: reports this rank's stage, so that others can name it if it stalls.
        machines: that the ranks are processes of; 0: nobody can tell.
    """

    __reduce_ex__ = no_copy("groups of ranks are those of their process; make them there (from_environment)")

    routing: Communicator
    retrieval: Communicator
    communication: Communicator
    checkpoint: Communicator
    shard_control: Communicator
    replica_routing: Communicator
    replica: Communicator
    node_routing: Communicator
    node: Communicator
    rail_routing: Communicator
    rail: Communicator
    reduce: Communicator
    control: Communicator
    stop: threading.Event = field(default_factory=threading.Event)
    watch: Watch = field(default_factory=lambda: Watch(None, 0, 1, TIMEOUT))
    machines: int = 0

    def copies_messages(self, device: torch.device) -> bool:
        """Whether messages of tensors on `device` are copies, made by the processors that compute."""
        return device.type == "cpu" and self.machines == 1

    @property
    def rank(self) -> int:
        """Among all ranks; decides which samples this rank trains on."""
        return self.control.rank

    @property
    def world_size(self) -> int:
        """T."""
        return self.control.world_size

    @property
    def shard(self) -> int:
        """Number of the shard of the tables that this rank owns."""
        return self.routing.rank

    @property
    def shards(self) -> int:
        """L, shards of the tables."""
        return self.routing.world_size

    @property
    def replicas(self) -> int:
        """G, copies of each shard."""
        return self.replica.world_size

    @property
    def nodes(self) -> int:
        """H, nodes between which lookups go in a step of their own; 1: they go in one step."""
        return self.rail.world_size

    @property
    def saves(self) -> bool:
        """Whether this rank saves its shard, one rank of each replica group."""
        return self.replica.rank == 0

    @classmethod
    def local(cls) -> Communicators:
        """For a run of one rank."""
        one: dict[str, Any] = {
            each.name: Communicator() for each in fields(cls) if each.type == "Communicator"
        }
        return cls(**one)

    @classmethod
    def over(
        cls,
        ranks: Sequence[int],
        timeout: timedelta = TIMEOUT,
        replicas: int = 1,
        backend: str = "gloo",
        watch: Watch | None = None,
        nodes: int = 1,
    ) -> Communicators | None:
        """Groups over `ranks`, `replicas` of which own the same shard; collective over the whole world.

        None on other ranks. Raises ValueError unless the replicas and the nodes divide the ranks, or where
        there are several of both, and `RanksDisagreeError` on all ranks where they give different arguments.

        Args:
            backend: of `torch.distributed`. Training on accelerators needs gloo for the host and another
                backend for the device: ``"cpu:gloo,cuda:nccl"``, ``"cpu:gloo,npu:hccl"``.
            watch: names a rank that is missing; by default one over the store of torchrun's variables, if
                they are set.
            nodes: of as many consecutive `ranks` each. A row then crosses between two nodes once, however
                many ranks of one look it up; 1: every rank asks every owner itself.
        """
        validate_division(len(ranks), replicas, nodes)
        mesh = torch.tensor(ranks, dtype=torch.int64, device="cpu").view(-1, replicas)
        return cls._of(mesh, timeout, backend, watch, nodes)

    @classmethod
    def on(
        cls, mesh: DeviceMesh, timeout: timedelta = TIMEOUT, backend: str = "gloo"
    ) -> Communicators | None:
        """Groups on a mesh whose dimensions are named ``shard`` and ``replicate``, in either order.

        ``init_device_mesh(device, (L, G), mesh_dim_names=("shard", "replicate"))`` makes one of all ranks.
        """
        names = mesh.mesh_dim_names or ()
        if sorted(names) != ["replicate", "shard"]:
            raise ValueError(f"the mesh needs the dimensions 'shard' and 'replicate', got {names}")
        return cls._of(mesh.mesh if names[0] == "shard" else mesh.mesh.t(), timeout, backend, None)

    @classmethod
    def _of(
        cls, mesh: torch.Tensor, timeout: timedelta, backend: str, watch: Watch | None, nodes: int = 1
    ) -> Communicators | None:
        """Groups on a mesh (L, G) of ranks; process groups count their ranks in ascending order."""
        if bool((mesh.diff(dim=0) <= 0).any()) or bool((mesh.diff(dim=1) <= 0).any()):
            raise ValueError(
                f"ranks must ascend along 'shard' and along 'replicate', got the mesh {mesh.tolist()}"
            )
        here, all_ranks = dist.get_rank(), sorted(mesh.flatten().tolist())
        found: dict[str, Any] = {}
        machines = 1

        def groups(parts: torch.Tensor, *names: str, monitored: bool = False) -> None:
            """For each name a communicator over this rank's row of `parts`."""
            own = max(timeout, SAVE_TIMEOUT) if monitored and watch is None else timeout
            for name in names:
                for ranks in parts.tolist():
                    # Every rank has to create every group, also those of other ranks.
                    group = None if len(ranks) == 1 else dist.new_group(ranks, own, backend)
                    if here in ranks:
                        peers = [all_ranks.index(rank) for rank in ranks]
                        unique = f"{name} of {' x '.join(map(str, (*mesh.shape, nodes)))} ranks {peers}"
                        found[name] = Communicator(group, unique, watch, peers, monitored)

        # The first group, over which the ranks compare their arguments: with other ones they would go on to
        # create other groups, and wait for each other.
        groups(torch.tensor([all_ranks], dtype=torch.int64, device="cpu"), "control")
        if control := found.get("control"):
            check_ranks_agree(
                control,
                {"replicas": mesh.shape[1], "nodes": nodes, "ranks": mesh.tolist(), "backend": backend},
            )
            watch = control.watch = watch or _watch_from_environment(control, timeout)
            machines = count_machines(control.all_gather_texts(machine()))
        groups(mesh.t(), "routing", "retrieval", "communication")
        groups(mesh.t(), "checkpoint", monitored=True)
        groups(mesh, "replica_routing", "replica")
        by_node, by_rail = nodes_and_rails(mesh, nodes)
        groups(by_node, "node_routing", "node")
        groups(by_rail, "rail_routing", "rail")
        groups(torch.tensor([all_ranks], dtype=torch.int64, device="cpu"), "reduce")
        if mesh.shape[1] == 1:
            found.update({"shard_control": found["control"]} if found else {})
        else:
            groups(mesh.t(), "shard_control")
        if not found:
            return None
        return cls(**found, watch=watch or Watch(None, 0, 1, timeout), machines=machines)


NO_REPLICAS = "lookups in two steps have no replicas"


def nodes_and_rails(mesh: torch.Tensor, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranks of each node, and of each rail, as rows; each rank alone where there is one node."""
    if nodes == 1:
        return mesh.view(-1, 1), mesh.view(-1, 1)
    by_node = mesh.view(nodes, -1)
    return by_node, by_node.t()


def validate_division(ranks: int, replicas: int, nodes: int) -> None:
    """Raise ValueError unless that many ranks are of so many replicas of the tables, and on so many nodes."""
    for number, what in ((replicas, "replicas"), (nodes, "nodes")):
        if number < 1 or ranks % number:
            raise ValueError(f"{number} {what} do not divide {ranks} ranks")
    if replicas > 1 and nodes > 1:
        raise ValueError(f"{replicas} replicas of the tables and {nodes} nodes: {NO_REPLICAS}")


def _watch_from_environment(control: Communicator, timeout: timedelta) -> Watch | None:
    """A watch over the store that torchrun's variables name, or None on all ranks. Collective."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if control.world_size == 1:
        return None
    store: dist.Store | None = None
    if address and port:
        try:
            where = address, int(port)
            store = within(CONNECT_TIMEOUT, lambda: connect_to(*where, CONNECT_TIMEOUT))
        except (ValueError, RuntimeError, TimeoutError):
            store = None  # the variables are not those of this run
    # Other runs, and other groups of this one, may use the same store.
    texts = control.all_gather_texts(secrets.token_hex(8) if store is not None else "")
    if store is None or not all(texts):
        return None
    server = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
    return Watch(dist.PrefixStore(texts[0], store), control.rank, control.world_size, timeout, server=server)
