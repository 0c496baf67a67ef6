"""The collectives a rank takes part in, over torch.distributed; with one rank they are local copies.

Every lane that communicates has a process group of its own, so that collectives of different lanes need no
common order: each lane issues its own in the schedule's order, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ops import GRID_BITS, ExactSumError

TIMEOUT = timedelta(seconds=60)
"""How long a collective waits for a rank that does not come before it raises."""

SAVE_TIMEOUT = timedelta(minutes=30)
"""The same for the group that saves, where ranks wait for each other's disks; a rank that died is noticed at
once, by its closed connection."""


class Communicator:
    """Exchanges among the ranks of one process group.

    Args:
        group: a process group of the calling rank, or None for a run of one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def serves(self, device: torch.device) -> bool:
        """Whether tensors on `device` can be exchanged; gloo takes those of the host only."""
        if self.group is None or device.type == "cpu":
            return True
        pairs = (pair.split(":") for pair in str(dist.get_backend_config(self.group)).split(","))
        return dict(pairs).get(device.type, "gloo") != "gloo"

    def all_to_all(
        self, values: torch.Tensor, send: list[int], receive: list[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Send ``send[r]`` leading rows of `values` to each rank r in turn, return what the ranks sent here.

        Args:
            values: (sum(send), ...) rows grouped by destination rank.
            send, receive: rows to and from each rank, world_size entries each.
            out: where the result goes, contiguous; new by default.

        Returns:
            (sum(receive), ...) rows grouped by source rank.
        """
        if self.group is None:
            return values.clone() if out is None else out.copy_(values)
        received = values.new_empty((sum(receive), *values.shape[1:])) if out is None else out
        dist.all_to_all_single(received, values.contiguous(), receive, send, group=self.group)
        return received

    def all_to_all_equal(self, values: torch.Tensor) -> torch.Tensor:
        """Row r of `values` (world_size, ...) goes to rank r; row r of the result came from rank r."""
        return self.all_to_all(values, [1] * self.world_size, [1] * self.world_size)

    def all_reduce(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Sum `values` over the ranks, in place.

        int64 sums on the grid are exact. A magnitude that could wrap around in the sum raises
        `ExactSumError` naming `name` before anything is sent.
        """
        if self.group is None:
            return values
        self._demand_room(values, name)
        dist.all_reduce(values, group=self.group)
        return values

    def _demand_room(self, values: torch.Tensor, name: str) -> None:
        """Raise `ExactSumError` where an int64 could wrap around in the sum over the ranks."""
        if values.dtype != torch.int64 or not values.numel():
            return
        limit = (2**63 - 1) // self.world_size
        for at in (int(values.argmax()), int(values.argmin())):
            value = int(values.view(-1)[at])
            if abs(value) > limit:
                raise ExactSumError(name, (at,), value, GRID_BITS, f"the others of {self.world_size} ranks")

    def all_reduce_bytes(self, values: torch.Tensor) -> int:
        """Bytes that leave a rank in `all_reduce`, as a ring does it: 2 (W - 1) / W of the values."""
        return 2 * values.numel() * values.element_size() * (self.world_size - 1) // self.world_size

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The rows (n, ...) of every rank, as many as it has, in rank order, on every rank."""
        world = self.world_size
        if world == 1:
            return [values]
        lengths = torch.full((world, 1), len(values), dtype=torch.int64)
        counts = self.all_to_all_equal(lengths).flatten().tolist()
        repeated = values.repeat(world, *(1 for _ in values.shape[1:]))
        return list(self.all_to_all(repeated, [len(values)] * world, counts).split(counts))

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, in rank order, on every rank."""
        mine = (
            torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            if text
            else torch.empty(0, dtype=torch.uint8)
        )
        parts = self.gather(mine)
        return [bytes(part.tolist()).decode() for part in parts]


@dataclass(frozen=True)
class Communicators:
    """One communicator for each lane that crosses ranks, `control` for the caller's own thread, and
    `checkpoint` for the one that saves.

    The caller runs beside the lanes: on a group of theirs its collectives would come before a lane's on one
    rank and after it on another.

    With G replicas of the tables (2D sparse parallelism) the T ranks form G sharding groups of L = T / G,
    whose ranks hold one part each of a whole set of tables, and L replica groups, whose ranks hold the same
    part: a mesh of L rows and G columns. T = 8, G = 2::

                      sharding group 0   sharding group 1
        replicas 0                   0                  1
        replicas 1                   2                  3       rank r holds part r // G
        replicas 2                   4                  5
        replicas 3                   6                  7

    Args:
        routing, retrieval, communication, checkpoint, shard_control: over this rank's sharding group.
        replica_routing, replica: over its replica group.
        reduce, control: over all ranks.
    """

    routing: Communicator
    retrieval: Communicator
    communication: Communicator
    checkpoint: Communicator
    shard_control: Communicator
    replica_routing: Communicator
    replica: Communicator
    reduce: Communicator
    control: Communicator

    @property
    def rank(self) -> int:
        """Among all ranks; which samples are this one's."""
        return self.control.rank

    @property
    def world_size(self) -> int:
        """T."""
        return self.control.world_size

    @property
    def shard(self) -> int:
        """Which part of the tables this rank holds."""
        return self.routing.rank

    @property
    def shards(self) -> int:
        """L, parts of the tables."""
        return self.routing.world_size

    @property
    def replicas(self) -> int:
        """G, copies of each part."""
        return self.replica.world_size

    @property
    def saves(self) -> bool:
        """Whether this rank's copy of its part is the one that is saved."""
        return self.replica.rank == 0

    @classmethod
    def local(cls) -> Communicators:
        """For a run of one rank."""
        return cls(**{each.name: Communicator() for each in fields(cls)})

    @classmethod
    def over(
        cls, ranks: Sequence[int], timeout: timedelta = TIMEOUT, replicas: int = 1, backend: str = "gloo"
    ) -> Communicators | None:
        """Groups over `ranks`, `replicas` of which hold the same part; collective over the whole world.

        None on ranks outside. Raises ValueError unless the replicas divide the ranks.

        Args:
            backend: of `torch.distributed`. Ranks that train on accelerators need one for tensors there
                beside gloo for those on the host: ``"cpu:gloo,cuda:nccl"``, ``"cpu:gloo,npu:hccl"``.
        """
        if replicas < 1 or len(ranks) % replicas:
            raise ValueError(f"{replicas} replicas do not divide {len(ranks)} ranks")
        return cls._of(torch.tensor(ranks, dtype=torch.int64).view(-1, replicas), timeout, backend)

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
        return cls._of(mesh.mesh if names[0] == "shard" else mesh.mesh.t(), timeout, backend)

    @classmethod
    def _of(cls, mesh: torch.Tensor, timeout: timedelta, backend: str) -> Communicators | None:
        """Groups on a mesh (L, G) of ranks; process groups count their ranks in ascending order."""
        if bool((mesh.diff(dim=0) <= 0).any()) or bool((mesh.diff(dim=1) <= 0).any()):
            raise ValueError(
                f"ranks must ascend along 'shard' and along 'replicate', got the mesh {mesh.tolist()}"
            )
        here, found = dist.get_rank(), {}

        def groups(parts: torch.Tensor, *names: str, timeout: timedelta = timeout) -> None:
            """One communicator by each name over this rank's part (rows of `parts`)."""
            for name in names:
                for ranks in parts.tolist():
                    # Every rank has to make every group, also those it is not in.
                    group = None if len(ranks) == 1 else dist.new_group(ranks, timeout, backend)
                    if here in ranks:
                        found[name] = Communicator(group)

        groups(mesh.t(), "routing", "retrieval", "communication")
        groups(mesh.t(), "checkpoint", timeout=max(timeout, SAVE_TIMEOUT))
        groups(mesh, "replica_routing", "replica")
        groups(mesh.reshape(1, -1), "reduce", "control")
        if mesh.shape[1] == 1:
            found.update({"shard_control": found["control"]} if found else {})
        else:
            groups(mesh.t(), "shard_control")
        return cls(**found) if found else None
