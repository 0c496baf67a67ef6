"""Versions of tables and programs: a reader of an old version keeps it whole while the next one is made.

A table lies in two buffers. The next version is made in the one that nobody reads, by the rows in which it
differs, and the two change places::

    version      buffer A             buffer B             a delta writes
    1            rows of 1, served    -
    2            rows of 1            rows of 2, served    all rows to B
    3            rows of 3, served    rows of 2            to A the rows of deltas 2 and 3
    4            rows of 3            rows of 4, served    to B the rows of deltas 3 and 4

Where somebody still has version 2 when 4 is made, B is left to them, and a new buffer is filled. Ids
stay sorted, since exact search takes equal scores by ascending ids: new ids behind the last one are appended,
others and erased rows move the rows behind them, in one pass without a sort.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..predictor import ExportedTable
from ..programs import alone


class Buffer:
    """Memory of rows (capacity, d) float32 that is lent to one version of a table at a time."""

    def __init__(self, capacity: int, dim: int):
        self._values = np.empty((capacity, dim), np.float32)
        self._lent: weakref.ref[np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_free(self) -> bool:
        """Whether no tensor, view or array has its memory any more."""
        return self._lent is None or self._lent() is None

    def lend(self, rows: int) -> Tensor:
        """The first rows; `is_free` is false while anything has a part of this tensor's memory."""
        part = self._values[:rows]
        # torch keeps the array `part` alive while any tensor or view has its memory, and nothing else does.
        self._lent = weakref.ref(part)
        return torch.from_numpy(part)


class LiveTable:
    """The newest version of a table, and what makes the next one.

    Attributes:
        table: the version. moved: rows written by the last `commit`, copies among them.
    """

    def __init__(self, table: ExportedTable):
        self.table, self.moved = table, 0
        self._own: Buffer | None = None  # of `table`; a loaded one has none
        self._spare: Buffer | None = None
        self._behind: Tensor | None = None  # places (b,) in which the spare differs; None: anywhere
        self._next: tuple[ExportedTable, Buffer, Tensor | None, int] | None = None

    def prepare(self, ids: Tensor, weights: Tensor, erased: Tensor) -> ExportedTable:
        """The version without the rows of `erased` (e,) and with `weights` (r, d) at `ids` (r,), ascending.

        It becomes this one by `commit`; without, nothing has happened.
        """
        old = self.table
        count, behind = len(old.ids), self._behind
        at, known = _places(old.ids, ids)
        gone, there = _places(old.ids, erased)
        gone, new = gone[there], ids[~known]
        total = count - len(gone) + len(new)
        # `behind`: rows in which the spare differs from the version that is served, which has to be copied
        # first.
        spare, self._spare, self._behind = self._spare, None, None  # whatever happens here, it is changed
        if spare is None or not spare.is_free or len(spare) < total:
            spare, behind = Buffer(total + total // 8, old.weights.shape[1]), None
        target = spare.lend(total)
        if len(gone) or (len(new) and count and new[0] < old.ids[-1]):
            kept = torch.ones(count, dtype=torch.bool, device="cpu")
            kept[gone] = False
            source, kept_ids = kept.nonzero().squeeze(1), old.ids[kept]
            put = torch.searchsorted(kept_ids, new) + torch.arange(len(new), dtype=torch.int64, device="cpu")
            stays = torch.ones(total, dtype=torch.bool, device="cpu")
            stays[put] = False
            all_ids, from_old = (
                torch.empty(total, dtype=torch.int64, device="cpu"),
                torch.zeros(total, dtype=torch.int64, device="cpu"),
            )
            all_ids[stays], all_ids[put], from_old[stays] = kept_ids, new, source
            torch.index_select(old.weights, 0, from_old, out=target)
            target[torch.searchsorted(all_ids, ids)] = weights
            changed, moved = None, total
        else:
            all_ids = torch.cat([old.ids, new]) if len(new) else old.ids
            if behind is None:
                target[:count] = old.weights
            else:
                target[behind] = old.weights[behind]
            changed = at
            changed[~known] = torch.arange(count, total, dtype=torch.int64, device="cpu")
            target[changed] = weights
            moved = len(ids) + (count if behind is None else len(behind))
        made = replace(old, ids=all_ids, weights=target)
        self._next = made, spare, changed, moved
        return made

    def commit(self) -> None:
        """Go on from the version of `prepare`, if there was one."""
        if self._next is not None:
            self.table, buffer, self._behind, self.moved = self._next
            self._spare, self._own, self._next = self._own, buffer, None

    def drop(self) -> None:
        """Forget the version of `prepare`."""
        self._next = None


def _places(ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Places (n,) of `wanted` (n,) in ascending `ids`, and whether they are there."""
    at = torch.searchsorted(ids, wanted)
    if not len(ids):
        return at, torch.zeros(len(wanted), dtype=torch.bool, device="cpu")
    return at, ids[at.clamp(max=len(ids) - 1)] == wanted


def with_values(program: Any, values: Mapping[str, Tensor]) -> Any:
    """A copy of a program with other tensors of these names; the others are shared."""
    own = program.state_dict(keep_vars=True)
    kept: dict[int, Any] = {id(each): each for each in [*program.parameters(), *program.buffers()]}
    kept |= {id(own[name]): in_place_of(own[name], value) for name, value in values.items()}
    with alone():
        return copy.deepcopy(program, kept)


def in_place_of(before: Tensor, value: Tensor) -> Tensor:
    """`value` as what a module had before: a parameter, or a buffer."""
    return (
        torch.nn.Parameter(value, before.requires_grad) if isinstance(before, torch.nn.Parameter) else value
    )
