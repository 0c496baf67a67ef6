"""Sweeps over a table's rows: what is evicted, and what is stored in 16 bits from now on."""

from __future__ import annotations

import numpy as np
import torch

from . import numba_sweep
from .chunks import MAX_ROWS
from .rows import TOO_LARGE, Rows, overflows, rounded
from .select import AllReduce, select_smallest

BLOCK = 4096
"""Rows that a sweep moves at a time; a write waits for no more than these."""


class Sweeps:
    """Eviction and heat of `rows`, on the thread of `DynamicTable.lookup`.

    Attributes:
        timed: whether the table's policies go by time at all.
        step: of the last lookup. recent: its keys (n,) int64, where policies go by time.
        unaged: whether some score is -1: loaded, and seen by no sweep yet.
    """

    def __init__(self, rows: Rows):
        self.rows = rows
        self.timed = rows.policy.eviction is not None or rows.policy.heat is not None
        self.step: int | None = None
        self.recent = torch.empty(0, dtype=torch.int64)
        self.unaged = False
        self._evicted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def maintain(self, keys: torch.Tensor, step: int, all_reduce: AllReduce | None) -> None:
        """What is due at `step`, before its `keys` (K,) int64 are looked up; spares them and the last."""
        eviction, heat = self.rows.policy.eviction, self.rows.policy.heat
        if not self.timed:
            return
        if not 0 <= step < 2**31 or (self.step is not None and step <= self.step):
            raise ValueError(
                f"{self.rows.names()}: lookup of step {step} after step {self.step}; a table with eviction "
                "or heat takes one lookup per step, in ascending order"
            )
        if eviction and step % eviction.every == 0:
            self._evict(keys, step, all_reduce)
        if heat and step % heat.every == 0:
            self._cool(keys, heat.threshold)
        with self.rows.lock:
            self.rows.touched.add(self.recent)  # recent no longer

    def _evict(self, keys: torch.Tensor, step: int, all_reduce: AllReduce | None) -> None:
        eviction = self.rows.policy.eviction
        assert eviction is not None
        if self.unaged and eviction.policy != "lfu":
            self._age(step)
        if eviction.capacity is not None:
            sizes = self.rows.sizes if all_reduce is None else all_reduce(self.rows.sizes.clone())
            excess = (sizes - eviction.capacity).clamp(min=0)
            if not bool(excess.any()):
                return
        candidates, scores = self._unprotected(keys, "score")
        if eviction.ttl is not None:
            chosen = step - scores > eviction.ttl
        else:
            members, ids = self.rows.unpack(candidates)
            chosen = select_smallest(scores, ids, members, excess, all_reduce)
        evicted = candidates[chosen].sort().values
        for part in evicted.split(BLOCK):
            if eviction.keep:
                kept = (part, self.rows.read(self.rows.find(part)))
                with self.rows.lock:
                    self._evicted.append(kept)
            self.rows.erase(part)
        self.rows.counters.evicted += len(evicted)

    def _age(self, step: int) -> None:
        """Rows loaded without a score count as used at `step`."""
        with self.rows.lock:
            keys, rows = self.rows.index.items()
            loaded = self.rows.noted("score", rows) < 0
            for store, _here, local in self.rows.by_store(rows[loaded]):
                store.notes["score"][local] = step
            self.rows.touched.add(keys[loaded])
            self.unaged = False

    def _cool(self, keys: torch.Tensor, threshold: int) -> None:
        """Halve the heat of all rows, and keep those in 16 bits that are cold now."""
        with self.rows.lock:
            if self.rows.touched.on:
                all_keys, rows = self.rows.index.items()
                self.rows.touched.add(all_keys[self.rows.noted("heat", rows) > 0])
            for store in self.rows.stores():
                store.notes["heat"][: store.used] >>= 1
        candidates, heat = self._unprotected(keys, "heat")
        for part in candidates[heat < threshold].sort().values.split(BLOCK):
            with self.rows.copying, self.rows.lock:
                rows = self.rows.index.find(part)
                full = (rows < MAX_ROWS).nonzero().squeeze(1)
                part, rows = part[full], rows[full]
                values = self.rows.read(rows)
                stored = rounded(values, self.rows.dim)
                bad = overflows(values, stored)
                if len(bad):
                    row, column = bad[0].tolist()
                    raise ValueError(
                        f"the row of {self.rows.name(part[row])} is cold, and {float(values[row, column])} "
                        f"in its column {column} does not fit 16 bits; {TOO_LARGE}"
                    )
                self.rows.touched.add(part)
                self.rows.write(self.rows.move(part, rows), stored)

    def _unprotected(self, keys: torch.Tensor, note: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,) of the table that neither `keys` nor the last lookup hold, and what is noted of them."""
        with self.rows.lock:
            all_keys, rows = self.rows.index.items()
            pinned = self.rows.index.find(torch.cat([keys, self.recent]))
            notes = [store.notes[note].numpy() for store in self.rows.stores()]
            marks = [np.zeros(store.used, np.bool_) for store in self.rows.stores()]
            marks[0][pinned[(pinned >= 0) & (pinned < MAX_ROWS)].numpy()] = True
            marks[-1][pinned[pinned >= MAX_ROWS].numpy() - MAX_ROWS] = True
            free_keys, noted = np.empty(len(rows), np.int64), np.empty(len(rows), notes[0].dtype)
            count = numba_sweep.unpinned(
                all_keys.numpy(), rows.numpy(), notes[0], notes[-1], marks[0], marks[-1], free_keys, noted
            )
        return torch.from_numpy(free_keys[:count]), torch.from_numpy(noted[:count])

    def take_evicted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,) and rows (n, row_width) evicted since the last call, if `Eviction.keep`; oldest first."""
        with self.rows.lock:
            evicted, self._evicted = self._evicted, []
        keys = [torch.empty(0, dtype=torch.int64), *(keys for keys, _ in evicted)]
        rows = [torch.empty(0, self.rows.row_width, dtype=torch.float32), *(rows for _, rows in evicted)]
        return torch.cat(keys), torch.cat(rows)
