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
    rows received, one rank     a b c d    -          -        4 rows, which leave no rank
    gradients sent, one rank    -          -          a b c d

Rows may also come with those of an earlier micro-batch and gradients leave with those of a later one
(`exchange_groups`), in the order in which each would have gone alone. Of micro-batches that share both, a row
comes once; an owner then meets its keys in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..embedding.selection import distinct, valid
from ..kernels import launch
from .exchange_groups import ExchangeGroups
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
        in_order: whether they are 0, 1, 2, ... through all micro-batches.
    """

    rows: list[torch.Tensor]
    splits: Splits
    in_order: bool = False

    def to(self, device: torch.device) -> RowDist:
        """The same plan with its rows on `device`."""
        if device.type == "cpu":
            return self
        return RowDist([to_device(rows, device) for rows in self.rows], self.splits, self.in_order)

    def of(self, values: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """The rows of `values` that are exchanged with a micro-batch: a view where they are in order."""
        if self.in_order:
            return values[slots(self.splits, micro_batch)]
        return launch.gather_rows(values, self.rows[micro_batch])


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
        distinct: whether the owner gets no key twice: that of no other rank, and of one micro-batch each.
    """

    inverse: list[torch.Tensor]
    splits: Splits
    gradients: RowDist
    keys: torch.Tensor
    last_use: torch.Tensor | None = None
    distinct: bool = False

    @property
    def num_rows(self) -> int:
        """S."""
        return self.keys.shape[0]

    @property
    def input_splits(self) -> list[int]:
        """[r] keys sent to rank r."""
        return column_sums(self.splits)

    def slots(self, micro_batch: int) -> slice:
        """Stored rows that are received with a micro-batch."""
        return slots(self.splits, micro_batch)


@dataclass(frozen=True)
class Lookups:
    """`InputDist` before the host knows its sizes; everything is on the device of the keys.

    Args:
        inverse: as there. keys, last_use: as there, with padding behind them.
        gradient_rows: stored rows by last use and then by owner, padding behind them; None: in their order.
        sizes: (1 or 2, M, W) int64, rows that owner r sends with micro-batch i; gradients sent likewise,
            where they may leave with another micro-batch than their rows come with.
        distinct: as there.
    """

    inverse: list[torch.Tensor]
    keys: torch.Tensor
    last_use: torch.Tensor | None
    gradient_rows: torch.Tensor | None
    sizes: torch.Tensor
    distinct: bool = False

    def input_dist(self, sizes: list[Splits]) -> InputDist:
        """The plan, with `sizes` on the host."""
        splits, gradient_splits = sizes[0], sizes[-1]
        size = sum(map(sum, splits))
        rows, in_order = self.gradient_rows, self.gradient_rows is None
        if rows is None:
            rows = torch.arange(size, device=self.keys.device)
        blocks = list(rows[:size].split([sum(row) for row in gradient_splits]))
        gradients = RowDist(blocks, gradient_splits, in_order)
        last_use = None if self.last_use is None else self.last_use[:size]
        return InputDist(self.inverse, splits, gradients, self.keys[:size], last_use, self.distinct)


def plan_lookups(
    keys: list[torch.Tensor],
    owners: Callable[[torch.Tensor], torch.Tensor],
    world_size: int,
    dedup: bool,
    first_use: bool,
    padded: bool = False,
    groups: ExchangeGroups | None = None,
) -> Lookups:
    """Plan the lookups of a window.

    Args:
        keys: [i] (n,) int64, the occurrences of micro-batch i.
        owners: keys -> the rank, below `world_size`, that each is sent to.
        dedup: look a key up once that a micro-batch repeats, or micro-batches that share their exchanges.
        first_use: look a key up once that the window repeats, when it is used first.
        padded: the host waits for no number of keys.
        groups: of micro-batches that share an exchange; None: none do.
    """
    lengths, count = [len(part) for part in keys], len(keys)
    rows, inverse, here, first, last = _looked_up(keys, dedup, first_use, padded, groups)
    device = rows.device
    if groups is not None:
        first, last = (
            to_device(torch.tensor(with_, dtype=torch.int64, device="cpu"), device)[each]
            for with_, each in ((groups.rows_with, first), (groups.gradients_with, last))
        )
    # Stored rows are sorted by (micro-batch, owner): each all-to-all then fills one contiguous block, already
    # grouped by the rank that sends. The sort is stable, so inside a block the order of first use stays.
    #     stored rows   | i=0: from r=0, r=1, .. | i=1: from r=0, r=1, .. |
    #     keys sent     | r=0: of i=0, i=1, ..   | r=1: of i=0, i=1, ..   |
    bins = count * world_size  # and a last one of padding
    owner = owners(rows)
    group = torch.where(here, first * world_size + owner, bins)
    source, sizes = launch.counting_sort(group, bins + 1)  # stored row -> which of `rows`
    sizes = sizes[:-1].view(count, world_size)
    number = torch.arange(len(source), device=device)
    # From "occurrence -> row of `rows`" to "occurrence ->
    # stored row": the inverse of the sort, then a lookup.
    inverse = torch.empty_like(source).index_copy_(0, source, number)[inverse]
    # Blocks of stored rows go by micro-batch and owner, those of keys sent by owner and micro-batch.
    # shift[i][r] = how far block (i, r) is from its place among the stored rows to that among the keys sent.
    shift = _starts(sizes.t()).t() - _starts(sizes)
    place = number + torch.cat([shift.flatten(), shift.new_zeros(1)])[group[source]]
    by_owner = torch.empty_like(rows).index_copy_(0, place, rows[source])
    split = list(inverse.split(lengths))
    if not first_use and groups is None:
        return Lookups(split, by_owner, None, None, sizes.unsqueeze(0))
    last, last_use = last[source], None
    if first_use:
        # In the order of the keys, which it travels with.
        last_use = torch.empty_like(last).index_copy_(0, place, last).to(torch.uint8)
    # Gradients leave by (last use, owner); a stable sort of the stored rows, as the owner sorts the keys it
    # has received (`plan_output_dist`), so both sides list a block in one order.
    leaving = torch.where(here[source], last * world_size + owner[source], bins)
    gradient_rows, gradient_sizes = launch.counting_sort(leaving, bins + 1)
    both = torch.stack([sizes, gradient_sizes[:-1].view(count, world_size)])
    # Where rows and gradients have the same groups the blocks are contiguous, and no row has to be gathered.
    in_order = not first_use and groups is not None and groups.same
    return Lookups(split, by_owner, last_use, None if in_order else gradient_rows, both)


def _looked_up(
    keys: list[torch.Tensor], dedup: bool, first_use: bool, padded: bool, groups: ExchangeGroups | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `plan_lookups` looks up, in the order of first use: keys (S,), the one of each occurrence (n,),
    which (S,) bool are no padding, and the first and the last micro-batch (S,) that use each.
    """
    lengths, occurrences = [len(part) for part in keys], torch.cat(keys)
    device = occurrences.device
    # using[k] = the micro-batch of occurrence k.
    using = repeated(lengths, device)
    if first_use:
        found = distinct(occurrences, padded)
        size, inverse = len(found.keys), found.inverse
        # Distinct keys come in the order of their first occurrence, and so of their first use, which is the
        # "amin" of the micro-batches that use a key; "amax" is its last.
        first, last = (
            using.new_zeros(size).scatter_reduce_(0, inverse, using, how, include_self=False)
            for how in ("amin", "amax")
        )
        return found.keys, inverse, valid(size, found.count, device), first, last
    if not dedup:
        size = len(occurrences)
        return occurrences, torch.arange(size, device=device), valid(size, None, device), using, using
    # Micro-batches that share both exchanges are deduplicated together: `runs` = [1, 1, 2, ...] of them each.
    runs = [1] * len(keys) if groups is None else groups.sharing
    together = [sum(lengths[end - run : end]) for run, end in zip(runs, accumulate(runs), strict=True)]
    parts = [distinct(part, padded) for part in occurrences.split(together)]
    sizes = [len(part.keys) for part in parts]
    # Each run's distinct keys follow those of the run before.
    starts = accumulate(sizes, initial=0)
    inverse = torch.cat([part.inverse + start for part, start in zip(parts, starts, strict=False)])
    here = torch.cat([valid(size, part.count, device) for part, size in zip(parts, sizes, strict=True)])
    first = repeated(sizes, device)
    if len(runs) < len(keys):  # of a run, its first micro-batch
        first = to_device(torch.tensor([0, *accumulate(runs[:-1])], dtype=torch.int64, device="cpu"), device)[
            first
        ]
    return torch.cat([part.keys for part in parts]), inverse, here, first, first


def plan_lookups_of_one_rank(keys: list[torch.Tensor]) -> Lookups:
    """Plan the lookups of a window whose rows this rank owns, in host memory: nothing travels, so its rows
    are exchanged at once before the first micro-batch, and its gradients after the last.

    Args:
        keys: as of `plan_lookups`, whose plan has these bits where sums of gradients have no order.
    """
    found, count = distinct(torch.cat(keys), padded=False), len(keys)
    sizes = torch.zeros(2, count, 1, dtype=torch.int64, device="cpu")
    # Rows "come" with the first micro-batch and gradients "leave"
    # with the last: sizes[0] are of rows, [1] of gradients.
    sizes[0, 0] = sizes[1, -1] = len(found.keys)
    inverse = list(found.inverse.split([part.shape[0] for part in keys]))
    return Lookups(inverse, found.keys, None, None, sizes, distinct=True)


def plan_output_dist(
    rows: torch.Tensor, splits: Splits, last_use: torch.Tensor | None, gradient_splits: Splits | None = None
) -> tuple[RowDist, RowDist]:
    """The rows that an owner sends with each micro-batch, and those whose gradients it receives.

    Args:
        rows: (R,) int64, the buffer row of each key received, `InputDist.keys` of rank 0, then of rank 1, ...
        splits: [i][r] keys of micro-batch i received from rank r.
        last_use: (R,) uint8 beside the keys, or None: gradients come in the order of the keys.
        gradient_splits: [i][r] gradients received with micro-batch i from rank r; None: as the keys.
    """
    count, world = len(splits), len(splits[0])

    def cut(splits: Splits) -> RowDist:
        # Keys come grouped by rank and inside it by micro-batch; pieces[i::count] are those of micro-batch i.
        pieces = rows.split([splits[i][r] for r in range(world) for i in range(count)])
        return RowDist([torch.cat(pieces[i::count]) for i in range(count)], splits)

    sent = cut(splits)
    if last_use is None:
        return sent, sent if gradient_splits in (None, splits) else cut(gradient_splits)
    assert gradient_splits is not None
    from_rank = repeated(column_sums(splits), rows.device)
    # The requester's order of `leaving`: by last use, then rank, then as the keys came.
    order, _counts = launch.counting_sort(last_use.long() * world + from_rank, count * world)
    blocks = rows[order].split([sum(row) for row in gradient_splits])
    return sent, RowDist(list(blocks), gradient_splits)


def slots(splits: Splits, micro_batch: int) -> slice:
    """Where the rows of a micro-batch are among those of all, one micro-batch after the other."""
    start = sum(map(sum, splits[:micro_batch]))
    return slice(start, start + sum(splits[micro_batch]))


def column_sums(splits: Splits) -> list[int]:
    """[r] the sums over micro-batches."""
    return [sum(column) for column in zip(*splits, strict=True)]


def _starts(sizes: torch.Tensor) -> torch.Tensor:
    """The first row of each block of `sizes`, blocks one after the other."""
    flat = sizes.flatten()
    return (flat.cumsum(0) - flat).view(sizes.shape)


def repeated(lengths: list[int], device: torch.device) -> torch.Tensor:
    """(sum of the lengths,) int64, the number i as often as ``lengths[i]`` says."""
    size = sum(lengths)
    repeats = to_device(torch.tensor(lengths, dtype=torch.int64, device="cpu"), device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=device), repeats, output_size=size)
