"""What travels with which micro-batch: the plan of one table's exchanges in a window.

    W ranks   M micro-batches   S rows that this rank asks for   R rows that it is asked for

Rows are frozen inside a window, so one that is here already need not come again, and the gradients of a key
can be added up here until its last use. Without ``first_use`` each micro-batch asks for all of its keys, and
the payload grows with M (NestPipe, Fig. 9); with it, the payload is that of the whole window, for any M::

    micro-batch            0          1          2
    keys                   a b c      b c d      a d
    rows come, plain       a b c      b c d      a d      8 rows, and as many gradients go
    rows come, first_use   a b c      d          -        4 rows
    gradients go, ditto    -          b c        a d      4 rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .. import ops
from .streams import to_device

MAX_FIRST_USE = 256
"""Micro-batches of a window with ``first_use``: the last use of a key travels in a byte."""


def no_keys() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass
class Leg:
    """Rows that travel with each micro-batch, between this rank and every other.

    Args:
        rows: [i] rows of the store, or of the owner's buffer, (n,) int64, grouped by the other rank.
        counts: [i][r] how many of them are for, or from, rank r.
    """

    rows: list[torch.Tensor] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)

    def to(self, device: torch.device) -> Leg:
        """The same leg with its rows on `device`."""
        return Leg([to_device(rows, device) for rows in self.rows], self.counts)


@dataclass
class Asked:
    """What this rank asks for. Rows that come fill a store (S, dim), by micro-batch and then by owner.

    Args:
        inverse: [i] occurrence of micro-batch i -> row of the store.
        arriving: [i][r] rows that come from owner r with micro-batch i.
        leaving: rows of the store whose gradients go home.
        keys: (S,) int64 grouped by owner, for the key exchange.
        last_use: (S,) uint8 beside the keys; None where gradients leave with the micro-batch of their rows.
    """

    inverse: list[torch.Tensor] = field(default_factory=list)
    arriving: list[list[int]] = field(default_factory=list)
    leaving: Leg = field(default_factory=Leg)
    keys: torch.Tensor = field(default_factory=no_keys)
    last_use: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """S."""
        return len(self.keys)

    @property
    def send(self) -> list[int]:
        """[r] keys asked of rank r."""
        return column_sums(self.arriving)

    def slots(self, micro_batch: int) -> slice:
        """Rows of the store that come with a micro-batch."""
        start = sum(map(sum, self.arriving[:micro_batch]))
        return slice(start, start + sum(self.arriving[micro_batch]))


def ask(
    keys: list[torch.Tensor],
    ids_of: Callable[[torch.Tensor], torch.Tensor],
    world_size: int,
    dedup: bool,
    first_use: bool,
) -> Asked:
    """Plan what to ask for.

    Args:
        keys: [i] (n,) int64, the occurrences of micro-batch i.
        ids_of: keys -> the ids that decide who owns them.
        dedup: ask once for a key that a micro-batch repeats.
        first_use: ask once for a key that the window repeats, when it is used first.
    """
    asked = Asked()
    lengths = [len(part) for part in keys]
    if first_use:
        distinct, inverse, _counts = ops.unique(torch.cat(keys))
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
                part, inverse, _counts = ops.unique(part)
            fresh.append(part)
            inverses.append(inverse + start)
            start += len(part)
        distinct, inverse = torch.cat(fresh), torch.cat(inverses)
    source = torch.empty_like(distinct)  # row of the store -> which of `distinct`
    start = 0
    for part in fresh:
        permutation, counts = ops.bucketize(ids_of(part), world_size)
        source[start : start + len(part)] = start + permutation
        asked.arriving.append(counts.tolist())
        start += len(part)
    place = torch.empty_like(source)
    place[source] = torch.arange(len(source), device=source.device)
    asked.inverse = list(place[inverse].split(lengths))
    asked.keys = _by_owner(distinct[source], asked.arriving)
    if first_use:
        last = last[source]
        asked.last_use = _by_owner(last, asked.arriving).to(torch.uint8)
        owners = _repeated(asked.arriving).to(last.device)
        asked.leaving = legs(torch.arange(len(last), device=last.device), last, owners, len(keys), world_size)
    else:
        blocks = torch.arange(len(source), device=source.device).split([len(part) for part in fresh])
        asked.leaving = Leg(list(blocks), asked.arriving)
    return asked


def answer(rows: torch.Tensor, receive: list[list[int]], last_use: torch.Tensor | None) -> tuple[Leg, Leg]:
    """What an owner sends with each micro-batch, and the gradients that come back: `wanted`, `returned`.

    Args:
        rows: (R,) int64, the buffer row of each key received, as `Asked.keys` of every rank in turn.
        receive: [i][r] keys of micro-batch i received from rank r.
        last_use: (R,) uint8 beside the keys, or None.
    """
    count, world = len(receive), len(receive[0])
    pieces = rows.split([receive[i][r] for r in range(world) for i in range(count)])
    wanted = Leg([torch.cat(pieces[i::count]) for i in range(count)], receive)
    if last_use is None:
        return wanted, wanted
    from_rank = torch.repeat_interleave(
        torch.arange(world), torch.tensor(column_sums(receive), dtype=torch.int64)
    )
    return wanted, legs(rows, last_use.long(), from_rank.to(rows.device), count, world)


def legs(
    rows: torch.Tensor, micro_batch: torch.Tensor, rank: torch.Tensor, count: int, world_size: int
) -> Leg:
    """Rows (n,) grouped by micro-batch (n,) and then by rank (n,), in their own order inside a group."""
    group = micro_batch * world_size + rank
    counts = torch.bincount(group, minlength=count * world_size).view(count, world_size)
    ordered = rows[torch.argsort(group, stable=True)]
    return Leg(list(ordered.split(counts.sum(1).tolist())), counts.tolist())


def column_sums(counts: list[list[int]]) -> list[int]:
    """[r] the sums over micro-batches of counts [i][r]."""
    return [sum(column) for column in zip(*counts, strict=True)]


def _by_owner(values: torch.Tensor, counts: list[list[int]]) -> torch.Tensor:
    """Values in the store's order to groups by owner, each in the order of the micro-batches."""
    world = len(counts[0])
    pieces = values.split([count for row in counts for count in row])
    return torch.cat([piece for r in range(world) for piece in pieces[r::world]])


def _repeated(counts: list[list[int]]) -> torch.Tensor:
    """The owner of each row of the store."""
    flat = torch.tensor(counts, dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(flat.shape[1]).repeat(len(flat)), flat.flatten())
