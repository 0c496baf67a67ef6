"""A table of rows by key that grows without moving a row (MTGRBoost, section 4.1)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from .. import ops
from . import numba_rows, numba_sweep
from .candidates import Candidates
from .changes import ChangeLog
from .chunks import MAX_ROWS, Chunks
from .key_index import KeyIndex
from .policy import TablePolicy
from .select import AllReduce, select_smallest

if TYPE_CHECKING:
    from .features import KeyLayout

_WORDS = np.empty(0, np.int16)  # tells the kernels the type of a stored value
BLOCK = 4096
"""Rows that a sweep moves at a time; a write waits for no more than these."""
TOO_LARGE = "lower the learning rate, or the heat threshold so that such rows stay in float32"


class Lookup(NamedTuple):
    """Where the rows of a step's keys lie.

    rows: (K,) int64, -1 for a key that is not admitted.
    cold: (K,) bool, the rows that are to be kept in 16 bits; None without heat. False where not admitted.
    """

    rows: torch.Tensor
    cold: torch.Tensor | None


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


class DynamicTable:
    """Rows (weights and optimizer state) by int64 key; any of the 2**64 keys is legal.

    The key structure is apart from the rows, which lie in chunks that never move. A key seen for the first
    time gets weights that are a function of (seed, table, key, column) and zero state, so neither the order
    of arrival, nor the rank, nor a restart or an eviction changes them. What the policies do depends on the
    steps' numbers and keys only.

    Threads: `lookup` of step t may run beside `write` of step t - 1, each on one thread and in the order of
    the steps; the write of step t - 2 is done by then. A row that is being written may be read stale.

    Args:
        dim: weights per row.
        row_width: float32 values per row, at least `dim`.
        layout: logical tables that share this one; None for a single one whose keys are its ids.
        seed: of the initial values.
        scale: initial weights are uniform in [-scale, scale).
        slots: slots of the key structure at the start, a power of two.
        chunk_rows: rows of one value chunk.
        policy: eviction, admission and heat; none by default.
    """

    def __init__(
        self,
        dim: int,
        row_width: int | None = None,
        *,
        layout: KeyLayout | None = None,
        seed: int = 0,
        scale: float = 0.05,
        slots: int = 1024,
        chunk_rows: int = 65536,
        policy: TablePolicy | None = None,
    ):
        self.dim, self.row_width = dim, dim if row_width is None else row_width
        if dim < 1 or self.row_width < dim:
            raise ValueError(f"a row of {self.row_width} values cannot hold {dim} weights")
        if not 1 <= chunk_rows <= MAX_ROWS // 2:
            raise ValueError(f"a chunk holds 1 to {MAX_ROWS // 2} rows, got {chunk_rows}")
        policy = policy or TablePolicy()
        self.layout, self.seed, self.scale, self.policy = layout, seed, scale, policy
        self.counters = Counters()
        self._index = KeyIndex(slots)
        notes = {}
        if policy.eviction:
            notes["score"] = torch.int32
        if policy.heat:
            notes["heat"] = torch.uint8
        self._full = Chunks(self.row_width, torch.float32, chunk_rows, notes)
        self._half = Chunks(self.row_width, torch.int16, chunk_rows, notes) if policy.heat else None
        self._candidates = Candidates(policy.admission, slots) if policy.admission > 1 else None
        self._timed = policy.eviction is not None or policy.heat is not None
        self._step: int | None = None  # of the last lookup
        self._recent = torch.empty(0, dtype=torch.int64)  # its keys, where policies go by time
        self._unaged = False  # whether some score is -1: loaded, and seen by no sweep yet
        self._sizes = torch.zeros(len(layout.names) if layout else 1, dtype=torch.int64)  # by logical table
        self._touched, self._counted = ChangeLog(), ChangeLog()  # keys of rows, and of candidates
        self._evicted: list[tuple[torch.Tensor, torch.Tensor]] = []
        # `_copying` is held while rows that exist are written, moved between stores or erased, so that their
        # numbers hold meanwhile; `_lock` briefly, for index, notes, free rows and counters. In this order.
        self._copying = threading.Lock()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def load_factor(self) -> float:
        """Share of the key structure's slots that are taken."""
        return self._index.load_factor

    # Every step.

    def lookup(self, keys: torch.Tensor, step: int, all_reduce: AllReduce | None = None) -> Lookup:
        """Find the rows of a step's keys, add those that are new; first do what is due at this step.

        Args:
            keys: (K,) int64, distinct.
            step: the step's number; larger than the last one's where the table evicts or counts heat.
            all_reduce: sums an int64 tensor over the ranks that share the table, for eviction by capacity;
                None for a single rank. Each rank calls `lookup` in every step, if without keys.

        At step t: sweeps erase and demote, sparing the keys of this lookup and of the last; then uses are
        counted and keys that are asked for often enough get rows.
        """
        self._maintain(keys, step, all_reduce)
        with self._lock:
            if self._candidates is None:
                rows, inserted = self._insert(keys)
                new, rejected = int(inserted.sum()), 0
                self._touched.add(keys)
            else:
                rows = self._index.find(keys)
                absent = (rows < 0).nonzero().squeeze(1)
                self._counted.add(keys[absent])
                admitted = absent[self._candidates.count(keys[absent])]
                new, rejected = len(admitted), len(absent) - len(admitted)
                rows[admitted] = self._insert(keys[admitted])[0]
                keys = keys[rows >= 0]
                self._touched.add(keys)
            self.counters.inserted += new
            self.counters.rejected += rejected
            self.counters.found += len(keys) - new  # those not admitted are gone from `keys`
            cold = self._note_use(rows, step) if self._timed else None
        if self._timed:
            self._recent, self._step = keys, step
        return Lookup(rows, cold)

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Row numbers of `keys` (K,) int64, -1 where absent; adds and counts nothing."""
        with self._lock:
            return self._index.find(keys)

    def read(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Copies of the rows numbered `rows` (K,) int64, those of `keys` (K,): (K, row_width) float32.

        A row number of -1 reads as what the key's row would start from.
        """
        values = self._read(rows)
        absent = rows < 0
        if bool(absent.any()):
            values[absent] = self._initial_rows(keys[absent])
        return values

    def round_cold(self, values: torch.Tensor, cold: torch.Tensor) -> None:
        """Round the `cold` (K,) bool rows of `values` (K, row_width), in place, to what 16 bits hold.

        Weights become float16 numbers and the state bfloat16 numbers, so that `write` keeps them exactly.

        Raises ValueError naming the row in `values` where a finite number does not fit.
        """
        here = cold.to(values.device).nonzero().squeeze(1)
        rows = values[here]
        rounded = _rounded(rows, self.dim)
        bad = _overflows(rows, rounded)
        if len(bad):
            row, column = bad[0].tolist()
            raise ValueError(
                f"{self._names()}: row {int(here[row])} of the step's rows is cold, and "
                f"{float(rows[row, column])} in its column {column} does not fit 16 bits; {TOO_LARGE}"
            )
        values[here] = rounded

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `values` (K, row_width) float32 as the rows of `keys` (K,) int64, distinct.

        Keys without a row are skipped: the row was evicted meanwhile. Leave out keys that were not admitted
        in the step that changed them; a later lookup may have given them a row that starts afresh.

        Nothing is rounded: a cold row lies in 16 bits if these hold its values exactly, as they do after
        `round_cold`, and in float32 otherwise.
        """
        self._check_values(keys, values)
        with self._copying:
            self._store(keys, values)

    def erase(self, keys: torch.Tensor) -> torch.Tensor:
        """Erase the rows of `keys` (K,) int64, distinct, and what was counted of them.

        Returns:
            (K,) bool, whether the key had a row.
        """
        if self._candidates is not None:
            with self._lock:
                self._candidates.forget(keys)
                self._counted.add(keys)
        return self._erase(keys)

    # Everything at once.

    def export(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,) int64 in ascending order and their rows (n, row_width) float32, copied."""
        with self._copying:
            keys, rows = self._items()
            return keys, self._read(rows)

    def load(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add or overwrite the rows of distinct `keys` (n,) with `values` (n, row_width).

        New rows are cold, count as used by no step (lfu) or at the step of the next sweep (lru, ttl).
        """
        self._check_values(keys, values)
        with self._copying:
            with self._lock:
                self._insert(keys)
                self._unaged = True
                if self._candidates is not None:
                    self._candidates.forget(keys)
                    self._counted.add(keys)
            self._store(keys, values)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """All that a restart needs, by group and column; each group has ``keys`` (n,) int64, ascending.

            rows         rows (n, row_width) float32; with eviction score (n,) int32; with heat
                         heat (n,) uint8; with either recent (n,) bool, used by the last lookup
            candidates   counts (n,) int32, only where admission is above 1

        The states of all ranks together, divided by keys in any way, are the state of another world size.
        """
        with self._copying:
            keys, rows = self._items()
            state = {"rows": self._columns(keys, rows)}
            if self._candidates is not None:
                with self._lock:
                    state["candidates"] = self._candidates.columns(self._candidates.keys())
        return state

    def load_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Take over what `state` gave, all of it or a part by keys; keys already there are overwritten.

        Raises ValueError where its columns are not those of this table's policies.
        """
        group, candidates = state.get("rows", {}), state.get("candidates", {})
        recent = ["recent"] if self._timed else []
        _check_columns("rows", group, ["keys", "rows", *self._full.notes, *recent])
        _check_columns("candidates", candidates, ["keys", "counts"] if self._candidates is not None else [])
        keys = group["keys"]
        self._check_values(keys, group["rows"])
        with self._copying:
            with self._lock:
                rows, _inserted = self._insert(keys)
                for name in self._full.notes:
                    for store, here, local in self._by_store(rows):
                        store.notes[name][local] = group[name][here]
                self._unaged = True
                if self._timed:
                    self._recent = torch.cat([self._recent, keys[group["recent"]]])
                if self._candidates is not None:
                    self._candidates.forget(keys)
                    self._candidates.load(candidates["keys"], candidates["counts"])
                    self._counted.add(torch.cat([keys, candidates["keys"]]))
            self._store(keys, group["rows"])
        self._step = None

    # What users read.

    def memory(self) -> dict[str, int]:
        """Bytes allocated on this rank, by what they are for, and bytes that cold rows do not take.

        key_structure, candidates (keys and counts of what is not admitted yet), metadata (scores, heat, lists
        of free rows), fp32_values, fp16_values, saved_by_fp16 (of the rows in use).
        """
        half, waiting = self._half, self._candidates
        return {
            "key_structure": self._index.nbytes,
            "candidates": 0 if waiting is None else waiting.nbytes,
            "metadata": sum(store.note_bytes for store in self._stores()),
            "fp32_values": self._full.value_bytes,
            "fp16_values": 0 if half is None else half.value_bytes,
            "saved_by_fp16": 0 if half is None else 2 * self.row_width * len(half),
        }

    @property
    def metadata_bytes_per_key(self) -> float:
        """Bytes per key apart from its values: its share of the key structure, its score and its heat."""
        noted = sum(note.itemsize for note in self._full.notes.values())
        return self._index.nbytes / max(len(self), 1) + noted

    def take_evicted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,) and rows (n, row_width) evicted since the last call, if `Eviction.keep`; oldest first."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
        keys = [torch.empty(0, dtype=torch.int64), *(keys for keys, _ in evicted)]
        rows = [torch.empty(0, self.row_width), *(rows for _, rows in evicted)]
        return torch.cat(keys), torch.cat(rows)

    def track_changes(self) -> None:
        """Note from now on what changes, for `take_changes`."""
        with self._lock:
            self._touched.start()
            self._counted.start()

    def take_changes(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        """What changed since the last call or `track_changes`.

        Returns:
            `state` of the keys that changed or came; by the same groups keys (n,) int64, ascending, that are
            there no longer. Without the keys of either, and with the entries of the first, the state of
            before is the state of now.
        """
        with self._copying:
            with self._lock:
                keys, counted = self._touched.keys(), self._counted.keys()
                self._touched.start()
                self._counted.start()
                rows = self._index.find(keys)
                present = rows >= 0
            changed = {"rows": self._columns(keys[present], rows[present])}
            erased = {"rows": keys[~present]}
            if self._candidates is not None:
                with self._lock:
                    present = self._candidates.has(counted)
                    changed["candidates"] = self._candidates.columns(counted[present])
                    erased["candidates"] = counted[~present]
        return changed, erased

    def _columns(self, keys: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Columns of `state` for `keys` (n,) and their row numbers; needs `_copying`."""
        columns = {"keys": keys}
        with self._lock:
            for name in self._full.notes:
                columns[name] = self._noted(name, rows)
            if self._timed:
                columns["recent"] = torch.isin(rows, self._index.find(self._recent))
        columns["rows"] = self._read(rows)
        return columns

    # Maintenance, on the thread of `lookup`.

    def _maintain(self, keys: torch.Tensor, step: int, all_reduce: AllReduce | None) -> None:
        eviction, heat = self.policy.eviction, self.policy.heat
        if not self._timed:
            return
        if not 0 <= step < 2**31 or (self._step is not None and step <= self._step):
            raise ValueError(
                f"{self._names()}: lookup of step {step} after step {self._step}; a table with eviction or "
                "heat takes one lookup per step, in ascending order"
            )
        if eviction and step % eviction.every == 0:
            self._evict(keys, step, all_reduce)
        if heat and step % heat.every == 0:
            self._cool(keys, heat.threshold)
        with self._lock:
            self._touched.add(self._recent)  # recent no longer

    def _evict(self, keys: torch.Tensor, step: int, all_reduce: AllReduce | None) -> None:
        eviction = self.policy.eviction
        assert eviction is not None
        if self._unaged and eviction.policy != "lfu":
            self._age(step)
        if eviction.capacity is not None:
            sizes = self._sizes if all_reduce is None else all_reduce(self._sizes.clone())
            excess = (sizes - eviction.capacity).clamp(min=0)
            if not bool(excess.any()):
                return
        candidates, scores = self._unprotected(keys, "score")
        if eviction.ttl is not None:
            chosen = step - scores > eviction.ttl
        else:
            members, ids = self._unpack(candidates)
            chosen = select_smallest(scores, ids, members, excess, all_reduce)
        evicted = candidates[chosen].sort().values
        for part in evicted.split(BLOCK):
            if eviction.keep:
                kept = (part, self._read(self.find(part)))
                with self._lock:
                    self._evicted.append(kept)
            self._erase(part)
        self.counters.evicted += len(evicted)

    def _age(self, step: int) -> None:
        """Rows loaded without a score count as used at `step`."""
        with self._lock:
            keys, rows = self._index.items()
            loaded = self._noted("score", rows) < 0
            for store, _here, local in self._by_store(rows[loaded]):
                store.notes["score"][local] = step
            self._touched.add(keys[loaded])
            self._unaged = False

    def _cool(self, keys: torch.Tensor, threshold: int) -> None:
        """Halve the heat of all rows, and keep those in 16 bits that are cold now."""
        with self._lock:
            if self._touched.on:
                all_keys, rows = self._index.items()
                self._touched.add(all_keys[self._noted("heat", rows) > 0])
            for store in self._stores():
                store.notes["heat"][: store.used] >>= 1
        candidates, heat = self._unprotected(keys, "heat")
        for part in candidates[heat < threshold].split(BLOCK):
            with self._copying, self._lock:
                rows = self._index.find(part)
                full = (rows < MAX_ROWS).nonzero().squeeze(1)
                part, rows = part[full], rows[full]
                values = self._read(rows)
                stored = _rounded(values, self.dim)
                bad = _overflows(values, stored)
                if len(bad):
                    row, column = bad[0].tolist()
                    raise ValueError(
                        f"the row of {self._name(part[row])} is cold, and {float(values[row, column])} in "
                        f"its column {column} does not fit 16 bits; {TOO_LARGE}"
                    )
                self._touched.add(part)
                self._write(self._move(part, rows), stored)

    def _unprotected(self, keys: torch.Tensor, note: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,) of the table that neither `keys` nor the last lookup hold, and what is noted of them."""
        with self._lock:
            all_keys, rows = self._index.items()
            pinned = self._index.find(torch.cat([keys, self._recent]))
            notes = [store.notes[note].numpy() for store in self._stores()]
            marks = [np.zeros(store.used, np.bool_) for store in self._stores()]
            marks[0][pinned[(pinned >= 0) & (pinned < MAX_ROWS)].numpy()] = True
            marks[-1][pinned[pinned >= MAX_ROWS].numpy() - MAX_ROWS] = True
            free_keys, noted = np.empty(len(rows), np.int64), np.empty(len(rows), notes[0].dtype)
            count = numba_sweep.unpinned(
                all_keys.numpy(), rows.numpy(), notes[0], notes[-1], marks[0], marks[-1], free_keys, noted
            )
        return torch.from_numpy(free_keys[:count]), torch.from_numpy(noted[:count])

    # Parts; those that touch index, notes or counters need `_lock`.

    def _insert(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row numbers (K,) of `keys`, and which are new (K,) bool; new rows are initial and unused."""
        store = self._full
        rows, inserted = self._index.insert(keys, store.used, store.next_free(len(keys)))
        new = inserted.nonzero().squeeze(1)
        if len(new):
            store.claim(len(new))
            self._write(rows[new], self._initial_rows(keys[new]))
            if "score" in store.notes:
                store.notes["score"][rows[new]] = self._unused_score()
                self._count_members(keys[new], 1)
            if "heat" in store.notes:
                store.notes["heat"][rows[new]] = 0
        return rows, inserted

    def _unused_score(self) -> int:
        eviction = self.policy.eviction
        return 0 if eviction and eviction.policy == "lfu" else -1

    def _note_use(self, rows: torch.Tensor, step: int) -> torch.Tensor | None:
        """Count a use of `rows` (K,), -1 left out; which of them are cold, (K,) bool."""
        eviction, heat = self.policy.eviction, self.policy.heat
        cold = torch.zeros(len(rows), dtype=torch.bool)
        present = (rows >= 0).nonzero().squeeze(1)
        for store, here, local in self._by_store(rows[present]):
            if eviction:
                score = store.notes["score"]
                score[local] = score[local] + 1 if eviction.policy == "lfu" else step
            if heat:
                uses = store.notes["heat"][local]
                uses += uses < 255
                store.notes["heat"][local] = uses
                cold[present[here]] = uses < heat.threshold
        return cold if heat else None

    def _store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`write` for one who holds `_copying`."""
        values, heat = values.contiguous(), self.policy.heat
        with self._lock:
            rows = self._index.find(keys)
            if self._touched.on:
                self._touched.add(keys[rows >= 0])
            if heat:
                present = (rows >= 0).nonzero().squeeze(1)
                cold = torch.zeros(len(rows), dtype=torch.bool)
                cold[present] = self._noted("heat", rows[present]) < heat.threshold
        if heat:
            half = torch.empty(len(rows), dtype=torch.bool)
            numba_rows.fits(values.view(-1).numpy(), self.dim, self.row_width, half.numpy())
            half &= cold
            with self._lock:
                for going in (half & (rows < MAX_ROWS), ~half & (rows >= MAX_ROWS)):
                    here = (going & (rows >= 0)).nonzero().squeeze(1)
                    rows[here] = self._move(keys[here], rows[here])
        self._write(rows, values)

    def _move(self, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Give `keys`, whose `rows` lie in one store, rows (K,) of the other; values do not come along."""
        if not len(keys):
            return rows
        full, half = self._full, self._half
        assert half is not None
        promoting = bool(rows[0] >= MAX_ROWS)
        source, target = (half, full) if promoting else (full, half)
        local, old = target.take(len(keys)), rows & (MAX_ROWS - 1)
        for name, note in source.notes.items():
            target.notes[name][local] = note[old]
        source.give_back(old)
        new = local if promoting else local + MAX_ROWS
        self._index.assign(keys, new)
        self.counters.promoted += len(keys) if promoting else 0
        self.counters.demoted += 0 if promoting else len(keys)
        return new

    def _erase(self, keys: torch.Tensor) -> torch.Tensor:
        with self._copying, self._lock:
            self._touched.add(keys)
            rows = self._index.erase(keys)
            present = rows >= 0
            for store, _here, local in self._by_store(rows[present]):
                store.give_back(local)
            if self.policy.eviction:
                self._count_members(keys[present], -1)
        return present

    def _items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,) int64, ascending, and their row numbers (n,)."""
        with self._lock:
            keys, rows = self._index.items()
        keys, order = keys.sort()
        return keys, rows[order].to(torch.int64)

    def _stores(self) -> list[Chunks]:
        return [self._full] if self._half is None else [self._full, self._half]

    def _by_store(self, rows: torch.Tensor) -> Iterator[tuple[Chunks, torch.Tensor, torch.Tensor]]:
        """(store, positions in `rows`, row numbers inside the store) of each store that `rows` touch."""
        half = rows >= MAX_ROWS
        for store, inside in zip(self._stores(), (~half, half), strict=False):
            here = inside.nonzero().squeeze(1)
            if len(here):
                yield store, here, rows[here] & (MAX_ROWS - 1)

    def _noted(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """What is noted under `name` about the rows (K,)."""
        noted = torch.empty(len(rows), dtype=self._full.notes[name].dtype)
        for store, here, local in self._by_store(rows):
            noted[here] = store.notes[name][local]
        return noted

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        """Copies (K, row_width) float32; where a row number is negative, anything."""
        values = torch.empty(len(rows), self.row_width)
        self._copy(numba_rows.read_rows, rows, values)
        return values

    def _write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite `rows` (K,), distinct, negative ones left out; those in 16 bits must fit these."""
        self._copy(numba_rows.write_rows, rows, values)

    def _copy(self, kernel: Callable, rows: torch.Tensor, values: torch.Tensor) -> None:
        full, half = self._full, self._full if self._half is None else self._half
        numbers = rows.contiguous().numpy()
        bad = numba_rows.first_outside(numbers, full.used, 0 if self._half is None else half.used)
        if bad >= 0:
            raise IndexError(f"{self._names()} has no row {int(rows[bad])}")
        kernel(
            full.addresses, half.addresses, full.chunk_rows, self.dim, self.row_width, numbers,
            values.view(-1).numpy(), _WORDS,
        )  # fmt: skip

    def _initial_rows(self, keys: torch.Tensor) -> torch.Tensor:
        values = torch.zeros(len(keys), self.row_width)
        if self.layout is None:
            values[:, : self.dim] = ops.initial_rows(self.seed, 0, keys, self.dim, self.scale)
        else:
            values[:, : self.dim] = self.layout.initial_rows(self.seed, keys, self.dim, self.scale)
        return values

    def _unpack(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (torch.zeros_like(keys), keys) if self.layout is None else self.layout.unpack(keys)

    def _count_members(self, keys: torch.Tensor, sign: int) -> None:
        members, _ids = self._unpack(keys)
        self._sizes += sign * torch.bincount(members, minlength=len(self._sizes))

    def _names(self) -> str:
        return "the table" if self.layout is None else f"table {', '.join(self.layout.names)}"

    def _name(self, key: torch.Tensor) -> str:
        member, number = self._unpack(key.view(1))
        name = f" of table {self.layout.names[int(member)]}" if self.layout else ""
        return f"id {int(number)}{name}"

    def _check_values(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if values.shape != (len(keys), self.row_width) or values.dtype != torch.float32:
            raise ValueError(
                f"{self._names()}: rows of shape {tuple(values.shape)} {values.dtype} do not fit {len(keys)} "
                f"keys of a table whose rows hold {self.row_width} float32 values; were they saved with "
                "another optimizer or dimension?"
            )


def _rounded(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Weights rounded to float16 and state to bfloat16, as float32 (K, row_width)."""
    weights, state = values[:, :dim].to(torch.float16), values[:, dim:].to(torch.bfloat16)
    return torch.cat([weights.to(torch.float32), state.to(torch.float32)], 1)


def _overflows(values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """(n, 2) row and column of finite values that are finite no longer when rounded."""
    return (values.isfinite() & ~rounded.isfinite()).nonzero()


def _check_columns(group: str, columns: dict[str, torch.Tensor], expected: list[str]) -> None:
    if columns.keys() != set(expected):
        raise ValueError(
            f"the state's {group} have columns {sorted(columns)}, this table's policy needs "
            f"{sorted(expected)}; was it saved under another policy? load() takes weights and optimizer state"
        )
