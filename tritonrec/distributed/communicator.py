"""The collectives a rank takes part in, over torch.distributed; with one rank they are local copies.

Every lane that communicates has a process group of its own, so that collectives of different lanes need no
common order: each lane issues its own in the schedule's order, which is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..ops import GRID_BITS, ExactSumError

TIMEOUT = timedelta(seconds=60)
"""How long a collective waits for a rank that does not come before it raises."""

SAVE_TIMEOUT = timedelta(minutes=30)
"""The same for the group that saves, where ranks wait for each other's disks; a rank that died is noticed at
once, by its closed connection."""

GROUPS = 6
"""Process groups of `Communicators`; the one that saves comes last."""


class Communicator:
    """Exchanges among the ranks of one process group.

    Args:
        group: a process group of the calling rank, or None for a run of one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

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
        if values.dtype == torch.int64 and values.numel():
            limit = (2**63 - 1) // self.world_size
            for at in (int(values.argmax()), int(values.argmin())):
                value = int(values.view(-1)[at])
                if abs(value) > limit:
                    raise ExactSumError(
                        name, (at,), value, GRID_BITS, f"the others of {self.world_size} ranks"
                    )
        dist.all_reduce(values, group=self.group)
        return values

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, in rank order, on every rank."""
        mine = (
            torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0).byte()
        )
        world = self.world_size
        lengths = self.all_to_all_equal(torch.full((world, 1), len(mine))).flatten().tolist()
        received = self.all_to_all(mine.repeat(world), [len(mine)] * world, lengths)
        return [bytes(part.tolist()).decode() for part in received.split(lengths)]


@dataclass(frozen=True)
class Communicators:
    """One communicator for each lane that crosses ranks, `control` for the caller's own thread, and
    `checkpoint` for the one that saves.

    The caller runs beside the lanes: on a group of theirs its collectives would come before a lane's on one
    rank and after it on another.
    """

    routing: Communicator
    retrieval: Communicator
    communication: Communicator
    reduce: Communicator
    control: Communicator
    checkpoint: Communicator

    @property
    def rank(self) -> int:
        return self.routing.rank

    @property
    def world_size(self) -> int:
        return self.routing.world_size

    @classmethod
    def local(cls) -> Communicators:
        """For a run of one rank."""
        return cls(*(Communicator() for _ in range(GROUPS)))

    @classmethod
    def over(cls, ranks: list[int], timeout: timedelta = TIMEOUT) -> Communicators | None:
        """Groups over `ranks`; collective over the whole world. None on ranks outside."""
        timeouts = [timeout] * (GROUPS - 1) + [max(timeout, SAVE_TIMEOUT)]
        groups = [dist.new_group(ranks, timeout=each, backend="gloo") for each in timeouts]
        if dist.get_rank() not in ranks:
            return None
        return cls(*(Communicator(group) for group in groups))
