"""Copies of the tables' parts, on ranks that train on different samples (2D sparse parallelism).

Exact: the copies add up their gradients before every update. Each takes a share of the rows, gets the others'
sums for them, packed, and hands the means on as float32.

Approximate, the source's scheme: within a sharding group the tables train on the group's samples alone, and
every so many updates the weights and optimizer states of each row are averaged over its copies. A row used by
two copies in between has taken two half-informed steps instead of one whole one. With late states each copy
goes on with the sums of squares that it has, and gets the others' share of them at the next average.
"""

from __future__ import annotations

import torch

from ..distributed import Communicator, Communicators
from ..embedding import HashTableCollection, TablePolicy
from ..embedding.row_optimizer import SCALED_BY_MOMENT
from ..embedding.selection import trimmed
from .places import OwnedRows
from .window import WindowConfig


def validate_replicable(
    tables: HashTableCollection, communicators: Communicators, config: WindowConfig
) -> None:
    """Raise ValueError where replicas of the tables do not go with the rest."""
    for group in tables.groups if config.moment_scaling else ():
        group.optimizer.over_copies(communicators.replicas)
    for group in tables.groups if config.late_states else ():
        if not group.optimizer.sums_squares:
            raise ValueError(
                f"late_states is of {' and '.join(SCALED_BY_MOMENT)}, whose states only grow, and the rows "
                f"of table {', '.join(group.layout.names)} have {group.optimizer.name}: leave it out"
            )
    if config.average_every and communicators.replicas == 1:
        raise ValueError("average_every averages replicas of the tables, and there is one copy only")
    if communicators.replicas > 1 and config.exchange.dedup not in ("lookup", "both"):
        raise ValueError(
            f"replicas of the tables need dedup before the lookup, got {config.exchange.dedup!r}"
        )


class ReplicaAverage:
    """Averages this rank's rows with those of the ranks that hold the same part.

    Only rows that some replica has used since the last average are exchanged: all others are equal.

    Args:
        tables: this rank's part; without policies, whose row metadata would drift apart, and without lazy
            weight decay, whose rows have the number of an update.
        communicator: over the replica group.
        late_states, holders: see `WindowConfig` (`average_holders`).

    Raises ValueError for other tables.
    """

    def __init__(
        self,
        tables: HashTableCollection,
        communicator: Communicator,
        late_states: bool = False,
        holders: bool = False,
    ):
        for group in tables.groups:
            if group.table.policy != TablePolicy():
                raise ValueError(
                    f"table {', '.join(group.layout.names)} has a policy: what it evicts, admits or keeps in "
                    "low precision would differ between replicas that are averaged; use exact gradients, "
                    "average_every=0"
                )
            if group.optimizer.lazy_weight_decay:
                raise ValueError(
                    f"table {', '.join(group.layout.names)} has lazy weight decay: the mean of the "
                    "numbers of a row's last updates is none of them; use exact gradients, average_every=0"
                )
        self.tables, self.communicator = tables, communicator
        self._late_states, self._holders = late_states, holders
        self.forget()

    def forget(self) -> None:
        """Begin anew, where all replicas have the same rows."""
        # By table the keys of the last average, with this copy's states then and their means.
        self._late: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None]
        self._late = [None for _ in self.tables.groups]
        self._used = [torch.empty(0, dtype=torch.int64, device="cpu") for _ in self.tables.groups]
        self._apart = False

    def check(self) -> None:
        """Raise RuntimeError where the replicas differ, of which one would be taken for all."""
        if self._apart:
            raise RuntimeError(
                "replicas of the tables trained apart since they were averaged: call Trainer.sync() first"
            )

    def note(self, owned: OwnedRows) -> None:
        """Remember the rows that a window has updated."""
        self._apart = True
        for index, table in enumerate(owned.tables):
            keys = trimmed(table.keys, table.count)
            self._used[index] = torch.cat([self._used[index].to(keys.device), keys]).unique()

    def average(self, whole: bool = True) -> int:
        """Average the rows used since the last call; returns the bytes of rows sent. Collective.

        The pipeline must be empty. A row that a replica has never seen counts with its initial value there,
        or not at all, where means are over those that hold it; afterwards all do. Late states follow with the
        next call, unless this one is `whole`.
        """
        sent = 0
        for index, group in enumerate(self.tables.groups):
            self._take_late_states(index)
            mine, self._used[index] = self._used[index], self._used[index][:0]
            keys = torch.cat(self.communicator.all_gather(mine)).unique()
            if not len(keys):
                continue
            handles, dim = group.table.find(keys), group.table.dim
            rows = group.table.gather(handles, keys)
            late = self._late_states and not whole
            own = rows[:, dim:].clone() if late else rows[:, :0]
            count = torch.full_like(rows[:, :1], self.communicator.world_size)
            if self._holders:
                count = (handles >= 0).to(rows).unsqueeze(1)
                rows *= count
                self.communicator.all_reduce(count, "copies of rows")
                sent += self.communicator.all_reduce_bytes(count)
            self.communicator.all_reduce(rows, "rows")
            sent += self.communicator.all_reduce_bytes(rows)
            rows /= count
            if late:
                self._late[index] = keys, own, rows[:, dim:].clone()
                rows[:, dim:] = own
            group.table.load(keys, rows)
        self._apart = self._late_states and not whole
        return sent

    def _take_late_states(self, index: int) -> None:
        """Add to the states of a table what the other copies had at the last average."""
        if (late := self._late[index]) is None:
            return
        self._late[index], table = None, self.tables.groups[index].table
        keys, before, mean = late
        rows = table.gather(table.find(keys), keys)
        states = rows[:, table.dim :]
        # Not used since: the very mean, which all copies then have in the same bits.
        states.copy_(torch.where(states == before, mean, states + (mean - before)))
        table.load(keys, rows)
