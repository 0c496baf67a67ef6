"""A table's rows by key: where they lie, what is noted about them, moves between float32 and 16 bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import ops
from . import numba_rows
from .changes import ChangeLog
from .chunks import MAX_ROWS, Chunks
from .key_index import KeyIndex
from .policy import TablePolicy

if TYPE_CHECKING:
    from .features import KeyLayout

TOO_LARGE = "lower the learning rate, or the heat threshold so that such rows stay in float32"
_WORDS = np.empty(0, np.int16)  # tells the kernels the type of a stored value


@dataclass
class Counters:
    """What a table has done so far, on this rank.

    found: keys asked for that had a row. inserted: rows made for new keys. rejected: keys asked for that got
    no row for want of admission, once for each time. evicted: rows erased by a sweep. promoted, demoted: rows
    moved to float32 and to 16 bits; a new cold row moves at its first write.
    """

    found: int = 0
    inserted: int = 0
    rejected: int = 0
    evicted: int = 0
    promoted: int = 0
    demoted: int = 0


class Rows:
    """The rows of a table on this rank, for `DynamicTable` and its `Sweeps`.

    `copying` is held while rows that exist are written, moved between stores or erased, so that their numbers
    hold meanwhile; `lock` briefly, for index, notes, free rows and counters. In this order.

    Args: as of `DynamicTable`.
    """

    def __init__(
        self,
        dim: int,
        row_width: int,
        layout: KeyLayout | None,
        seed: int,
        scale: float,
        slots: int,
        chunk_rows: int,
        policy: TablePolicy,
    ):
        if dim < 1 or row_width < dim:
            raise ValueError(f"a row of {row_width} values cannot hold {dim} weights")
        if not 1 <= chunk_rows <= MAX_ROWS // 2:
            raise ValueError(f"a chunk holds 1 to {MAX_ROWS // 2} rows, got {chunk_rows}")
        self.dim, self.row_width = dim, row_width
        self.layout, self.seed, self.scale, self.policy = layout, seed, scale, policy
        self.counters = Counters()
        self.index = KeyIndex(slots)
        notes = {}
        if policy.eviction:
            notes["score"] = torch.int32
        if policy.heat:
            notes["heat"] = torch.uint8
        self.full = Chunks(row_width, torch.float32, chunk_rows, notes)
        self.half = Chunks(row_width, torch.int16, chunk_rows, notes) if policy.heat else None
        self.sizes = torch.zeros(len(layout.names) if layout else 1, dtype=torch.int64)  # by logical table
        self.touched = ChangeLog()  # keys of rows
        self.copying, self.lock = threading.Lock(), threading.Lock()

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Row numbers of `keys` (K,) int64, -1 where absent; takes `lock`."""
        with self.lock:
            return self.index.find(keys)

    # What touches index, notes or counters needs `lock`.

    def insert(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row numbers (K,) of `keys`, and which are new (K,) bool; new rows are initial and unused."""
        store = self.full
        rows, inserted = self.index.insert(keys, store.used, store.next_free(len(keys)))
        new = inserted.nonzero().squeeze(1)
        if len(new):
            store.claim(len(new))
            self.write(rows[new], self.initial_rows(keys[new]))
            if "score" in store.notes:
                store.notes["score"][rows[new]] = self.unused_score()
                self._count_members(keys[new], 1)
            if "heat" in store.notes:
                store.notes["heat"][rows[new]] = 0
        return rows, inserted

    def unused_score(self) -> int:
        eviction = self.policy.eviction
        return 0 if eviction and eviction.policy == "lfu" else -1

    def note_use(self, rows: torch.Tensor, step: int) -> torch.Tensor | None:
        """Count a use of `rows` (K,), -1 left out; which of them are cold, (K,) bool."""
        eviction, heat = self.policy.eviction, self.policy.heat
        cold = torch.zeros(len(rows), dtype=torch.bool)
        present = (rows >= 0).nonzero().squeeze(1)
        for store, here, local in self.by_store(rows[present]):
            if eviction:
                score = store.notes["score"]
                score[local] = score[local] + 1 if eviction.policy == "lfu" else step
            if heat:
                uses = store.notes["heat"][local]
                uses += uses < 255
                store.notes["heat"][local] = uses
                cold[present[here]] = uses < heat.threshold
        return cold if heat else None

    def store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite the rows of `keys` (K,), each in the kind that fits it; needs `copying`."""
        values, heat = values.contiguous(), self.policy.heat
        with self.lock:
            rows = self.index.find(keys)
            if self.touched.on:
                self.touched.add(keys[rows >= 0])
            if heat:
                present = (rows >= 0).nonzero().squeeze(1)
                cold = torch.zeros(len(rows), dtype=torch.bool)
                cold[present] = self.noted("heat", rows[present]) < heat.threshold
        if heat:
            half = torch.empty(len(rows), dtype=torch.bool)
            numba_rows.fits(values.view(-1).numpy(), self.dim, self.row_width, half.numpy())
            half &= cold
            with self.lock:
                for going in (half & (rows < MAX_ROWS), ~half & (rows >= MAX_ROWS)):
                    here = (going & (rows >= 0)).nonzero().squeeze(1)
                    rows[here] = self.move(keys[here], rows[here])
        self.write(rows, values)

    def move(self, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Give `keys`, whose `rows` lie in one store, rows (K,) of the other; values do not come along."""
        if not len(keys):
            return rows
        full, half = self.full, self.half
        assert half is not None
        promoting = bool(rows[0] >= MAX_ROWS)
        source, target = (half, full) if promoting else (full, half)
        local, old = target.take(len(keys)), rows & (MAX_ROWS - 1)
        for name, note in source.notes.items():
            target.notes[name][local] = note[old]
        source.give_back(old)
        new = local if promoting else local + MAX_ROWS
        self.index.assign(keys, new)
        self.counters.promoted += len(keys) if promoting else 0
        self.counters.demoted += 0 if promoting else len(keys)
        return new

    def erase(self, keys: torch.Tensor) -> torch.Tensor:
        with self.copying, self.lock:
            self.touched.add(keys)
            rows = self.index.erase(keys)
            present = rows >= 0
            for store, _here, local in self.by_store(rows[present]):
                store.give_back(local)
            if self.policy.eviction:
                self._count_members(keys[present], -1)
        return present

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,) int64, ascending, and their row numbers (n,)."""
        with self.lock:
            keys, rows = self.index.items()
        keys, order = keys.sort()
        return keys, rows[order].to(torch.int64)

    def stores(self) -> list[Chunks]:
        return [self.full] if self.half is None else [self.full, self.half]

    def by_store(self, rows: torch.Tensor) -> Iterator[tuple[Chunks, torch.Tensor, torch.Tensor]]:
        """(store, positions in `rows`, row numbers inside the store) of each store that `rows` touch."""
        half = rows >= MAX_ROWS
        for store, inside in zip(self.stores(), (~half, half), strict=False):
            here = inside.nonzero().squeeze(1)
            if len(here):
                yield store, here, rows[here] & (MAX_ROWS - 1)

    def noted(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """What is noted under `name` about the rows (K,)."""
        noted = torch.empty(len(rows), dtype=self.full.notes[name].dtype)
        for store, here, local in self.by_store(rows):
            noted[here] = store.notes[name][local]
        return noted

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Copies (K, row_width) float32; where a row number is negative, anything."""
        values = torch.empty(len(rows), self.row_width, dtype=torch.float32)
        self._copy(numba_rows.read_rows, rows, values)
        return values

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite `rows` (K,), distinct, negative ones left out; those in 16 bits must fit these."""
        self._copy(numba_rows.write_rows, rows, values)

    def _copy(self, kernel: Callable, rows: torch.Tensor, values: torch.Tensor) -> None:
        full, half = self.full, self.full if self.half is None else self.half
        numbers = rows.contiguous().numpy()
        bad = numba_rows.first_outside(numbers, full.used, 0 if self.half is None else half.used)
        if bad >= 0:
            raise IndexError(f"{self.names()} has no row {int(rows[bad])}")
        kernel(
            full.addresses, half.addresses, full.chunk_rows, self.dim, self.row_width, numbers,
            values.view(-1).numpy(), _WORDS,
        )  # fmt: skip

    def initial_rows(self, keys: torch.Tensor) -> torch.Tensor:
        values = torch.zeros(len(keys), self.row_width, dtype=torch.float32)
        if self.layout is None:
            values[:, : self.dim] = ops.initial_rows(self.seed, 0, keys, self.dim, self.scale)
        else:
            values[:, : self.dim] = self.layout.initial_rows(self.seed, keys, self.dim, self.scale)
        return values

    def unpack(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (torch.zeros_like(keys), keys) if self.layout is None else self.layout.unpack(keys)

    def _count_members(self, keys: torch.Tensor, sign: int) -> None:
        members, _ids = self.unpack(keys)
        self.sizes += sign * torch.bincount(members, minlength=len(self.sizes))

    def names(self) -> str:
        return "the table" if self.layout is None else f"table {', '.join(self.layout.names)}"

    def name(self, key: torch.Tensor) -> str:
        member, number = self.unpack(key.view(1))
        name = f" of table {self.layout.names[int(member)]}" if self.layout else ""
        return f"id {int(number)}{name}"

    def check_values(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if values.shape != (len(keys), self.row_width) or values.dtype != torch.float32:
            raise ValueError(
                f"{self.names()}: rows of shape {tuple(values.shape)} {values.dtype} do not fit {len(keys)} "
                f"keys of a table whose rows hold {self.row_width} float32 values; were they saved with "
                "another optimizer or dimension?"
            )


def rounded(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Weights rounded to float16 and state to bfloat16, as float32 (K, row_width)."""
    weights, state = values[:, :dim].to(torch.float16), values[:, dim:].to(torch.bfloat16)
    return torch.cat([weights.to(torch.float32), state.to(torch.float32)], 1)


def overflows(values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """(n, 2) row and column of finite values that are finite no longer when rounded."""
    return (values.isfinite() & ~rounded.isfinite()).nonzero()
