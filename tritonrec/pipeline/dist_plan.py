"""The plan of one table's input and output dist in a window: which row is exchanged with which micro-batch.

    W ranks   M micro-batches   S rows that this rank looks up   R keys that it receives as an owner

The input dist sends each key to its owner, the output dist sends rows back, and gradients go the way of the
keys. Rows are frozen inside a window, so a row that is here already need not be sent again, and the gradients
of a key can be added up here until its last use. Without ``first_use`` each micro-batch gets all of its rows,
and the payload grows with M (NestPipe, Fig. 9); with it, the payload is that of the whole window, for any M::

    micro-batch                 0          1          2
    keys                        a b c      b c d      a d
    rows received, plain        a b c      b c d      a d      8 rows, and as many gradients sent
    rows received, first_use    a b c      d          -        4 rows
    gradients sent, first_use   -          b c        a d      4 rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels import launch
from .streams import to_device

MAX_FIRST_USE = 256
"""Micro-batches of a window with ``first_use``: the last use of a key is sent as a byte."""

Splits = list[list[int]]
"""[i][r] how many rows of micro-batch i are exchanged with rank r: the splits of M all-to-alls."""


@dataclass(frozen=True)
class RowDist:
    """Rows exchanged with each micro-batch between this rank and every other.

    Args:
        rows: [i] (n,) int64, rows of the requesting rank's embeddings or of the owner's buffer, grouped by
            the other rank.
        splits: [i][r] how many of them are exchanged with rank r.
    """

    rows: list[torch.Tensor]
    splits: Splits

    def to(self, device: torch.device) -> RowDist:
        """The same plan with its rows on `device`."""
        return RowDist([to_device(rows, device) for rows in self.rows], self.splits)


@dataclass(frozen=True)
class InputDist:
    """One table's lookups on the requesting rank.

    Rows received are stored as (S, dim), by micro-batch and then by owner.

    Args:
        inverse: [i] (n,) int64, occurrence of micro-batch i -> stored row.
        splits: [i][r] rows that owner r sends with micro-batch i.
        gradients: stored rows whose gradients are sent to their owners with each micro-batch.
        keys: (S,) int64 grouped by owner, for the all-to-all of keys.
        last_use: (S,) uint8 beside the keys, the last micro-batch that uses each; None where gradients are
            sent with the micro-batch of their rows.
    """

    inverse: list[torch.Tensor]
    splits: Splits
    gradients: RowDist
    keys: torch.Tensor
    last_use: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """S."""
        return len(self.keys)

    @property
    def input_splits(self) -> list[int]:
        """[r] keys sent to rank r."""
        return column_sums(self.splits)

    def slots(self, micro_batch: int) -> slice:
        """Stored rows that are received with a micro-batch."""
        start = sum(map(sum, self.splits[:micro_batch]))
        return slice(start, start + sum(self.splits[micro_batch]))


def plan_input_dist(
    keys: list[torch.Tensor],
    ids_of: Callable[[torch.Tensor], torch.Tensor],
    world_size: int,
    dedup: bool,
    first_use: bool,
) -> InputDist:
    """Plan the lookups of a window.

    Args:
        keys: [i] (n,) int64, the occurrences of micro-batch i.
        ids_of: keys -> the ids that decide who owns them.
        dedup: look a key up once that a micro-batch repeats.
        first_use: look a key up once that the window repeats, when it is used first.
    """
    lengths = [len(part) for part in keys]
    if first_use:
        distinct, inverse, _counts = launch.unique(torch.cat(keys))
        device = distinct.device
        using = torch.repeat_interleave(
            torch.arange(len(keys), device=device), torch.tensor(lengths, dtype=torch.int64, device=device)
        )
        # Distinct keys come in the order of their first occurrence, and so of their first use.
        first = using.new_zeros(len(distinct)).scatter_reduce_(0, inverse, using, "amin", include_self=False)
        last = using.new_zeros(len(distinct)).scatter_reduce_(0, inverse, using, "amax", include_self=False)
        fresh = list(distinct.split(torch.bincount(first, minlength=len(keys)).tolist()))
    else:
        fresh, inverses, start = [], [], 0
        for part in keys:
            inverse = torch.arange(len(part), device=part.device)
            if dedup:
                part, inverse, _counts = launch.unique(part)
            fresh.append(part)
            inverses.append(inverse + start)
            start += len(part)
        distinct, inverse = torch.cat(fresh), torch.cat(inverses)
    source = torch.empty_like(distinct)  # stored row -> which of `distinct`
    splits: Splits = []
    start = 0
    for part in fresh:
        permutation, counts = launch.bucketize(ids_of(part), world_size)
        source[start : start + len(part)] = start + permutation
        splits.append(counts.tolist())
        start += len(part)
    place = torch.empty_like(source)
    place[source] = torch.arange(len(source), device=source.device)
    inverse_of = list(place[inverse].split(lengths))
    by_owner = _by_owner(distinct[source], splits)
    if not first_use:
        blocks = torch.arange(len(source), device=source.device).split([len(part) for part in fresh])
        return InputDist(inverse_of, splits, RowDist(list(blocks), splits), by_owner)
    last = last[source]
    owners = _owners(splits).to(last.device)
    rows = torch.arange(len(last), device=last.device)
    gradients = group_by_micro_batch(rows, last, owners, len(keys), world_size)
    return InputDist(inverse_of, splits, gradients, by_owner, _by_owner(last, splits).to(torch.uint8))


def plan_output_dist(
    rows: torch.Tensor, splits: Splits, last_use: torch.Tensor | None
) -> tuple[RowDist, RowDist]:
    """The rows that an owner sends with each micro-batch, and those whose gradients it receives.

    Args:
        rows: (R,) int64, the buffer row of each key received, `InputDist.keys` of rank 0, then of rank 1, ...
        splits: [i][r] keys of micro-batch i received from rank r.
        last_use: (R,) uint8 beside the keys, or None.
    """
    count, world = len(splits), len(splits[0])
    pieces = rows.split([splits[i][r] for r in range(world) for i in range(count)])
    sent = RowDist([torch.cat(pieces[i::count]) for i in range(count)], splits)
    if last_use is None:
        return sent, sent
    from_rank = torch.repeat_interleave(
        torch.arange(world), torch.tensor(column_sums(splits), dtype=torch.int64)
    )
    return sent, group_by_micro_batch(rows, last_use.long(), from_rank.to(rows.device), count, world)


def group_by_micro_batch(
    rows: torch.Tensor, micro_batch: torch.Tensor, rank: torch.Tensor, count: int, world_size: int
) -> RowDist:
    """Rows (n,) grouped by micro-batch (n,) and then by rank (n,), in their own order inside a group."""
    group = micro_batch * world_size + rank
    counts = torch.bincount(group, minlength=count * world_size).view(count, world_size)
    ordered = rows[torch.argsort(group, stable=True)]
    return RowDist(list(ordered.split(counts.sum(1).tolist())), counts.tolist())


def column_sums(splits: Splits) -> list[int]:
    """[r] the sums over micro-batches."""
    return [sum(column) for column in zip(*splits, strict=True)]


def _by_owner(values: torch.Tensor, splits: Splits) -> torch.Tensor:
    """Values in the order of the stored rows to groups by owner, each in the order of the micro-batches."""
    world = len(splits[0])
    pieces = values.split([count for row in splits for count in row])
    return torch.cat([piece for r in range(world) for piece in pieces[r::world]])


def _owners(splits: Splits) -> torch.Tensor:
    """(S,) the owner of each stored row."""
    flat = torch.tensor(splits, dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(flat.shape[1]).repeat(len(flat)), flat.flatten())
