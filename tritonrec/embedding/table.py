"""A table of rows by key that grows without moving a row (MTGRBoost, section 4.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .candidates import Candidates
from .changes import ChangeLog
from .in_flight import InFlight
from .policy import TablePolicy
from .rows import TOO_LARGE, Counters, Rows, overflows, rounded
from .select import AllReduce
from .sweeps import Sweeps

if TYPE_CHECKING:
    from .features import KeyLayout


class Lookup(NamedTuple):
    """Where the rows of a step's keys lie.

    rows: (K,) int64, -1 for a key that is not admitted.
    cold: (K,) bool, the rows that are to be kept in 16 bits; None without heat. False where not admitted.
    """

    rows: torch.Tensor
    cold: torch.Tensor | None


class DynamicTable:
    """Rows (weights and optimizer state) by int64 key; any of the 2**64 keys is legal.

    The key structure is apart from the rows, which lie in chunks that never move. A key seen for the first
    time gets weights that are a function of (seed, table, key, column) and zero state, so neither the order
    of arrival, nor the rank, nor a restart or an eviction changes them. What the policies do depends on the
    steps' numbers and keys only.

    Threads: `lookup` of step t may run beside `write` of step t - 1, each on one thread and in the order of
    the steps; the write of step t - 2 is done by then. A row that is being written may be read stale. While a
    trainer has windows in flight, its lanes alone may call the methods that read or write rows: others get a
    RuntimeError. Counters, `memory` and the number of rows may be read at any time, and run ahead.

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
        self.layout, self.seed, self.scale, self.policy = layout, seed, scale, policy or TablePolicy()
        self._rows = Rows(dim, self.row_width, layout, seed, scale, slots, chunk_rows, self.policy)
        self._sweeps = Sweeps(self._rows)
        self._candidates: Candidates | None = None
        if self.policy.admission > 1:
            self._candidates = Candidates(self.policy.admission, self.policy.admission_window, slots)
        self._counted = ChangeLog()  # keys of candidates
        self.in_flight = InFlight(self._rows.names())

    @property
    def counters(self) -> Counters:
        """What this table has done so far."""
        return self._rows.counters

    def __len__(self) -> int:
        return len(self._rows.index)

    @property
    def load_factor(self) -> float:
        """Share of the key structure's slots that are taken."""
        return self._rows.index.load_factor

    # Every step.

    def lookup(self, keys: torch.Tensor, step: int, all_reduce: AllReduce | None = None) -> Lookup:
        """Find the rows of a step's keys, add those that are new; first do what is due at this step.

        Args:
            keys: (K,) int64, distinct.
            step: the step's number; larger than the last one's where the table evicts or counts heat, and
                below 2**31 where it goes by time at all.
            all_reduce: sums an int64 tensor over the ranks that share the table, for eviction by capacity;
                None for a single rank. Each rank calls `lookup` in every step, if without keys.

        At step t: sweeps erase and demote, sparing the keys of this lookup and of the last, and forget keys
        that wait for admission; then uses are counted and keys that are asked for often enough get rows.
        """
        self.in_flight.check("lookup")
        if self._candidates is not None and not 0 <= step < 2**31:
            raise ValueError(f"{self._rows.names()}: step must be in [0, 2**31) with admission, got {step}")
        self._sweeps.maintain(keys, step, all_reduce)
        with self._rows.lock:
            if self._candidates is None:
                rows, inserted = self._rows.insert(keys)
                new, rejected = int(inserted.sum()), 0
                self._rows.touched.add(keys)
            else:
                self._counted.add(self._candidates.sweep(step))
                rows = self._rows.index.find(keys)
                absent = (rows < 0).nonzero().squeeze(1)
                self._counted.add(keys[absent])
                admitted = absent[self._candidates.count(keys[absent], step)]
                new, rejected = len(admitted), len(absent) - len(admitted)
                rows[admitted] = self._rows.insert(keys[admitted])[0]
                keys = keys[rows >= 0]
                self._rows.touched.add(keys)
            self.counters.inserted += new
            self.counters.rejected += rejected
            self.counters.found += len(keys) - new  # those not admitted are gone from `keys`
            cold = self._rows.note_use(rows, step) if self._sweeps.timed else None
        if self._sweeps.timed:
            self._sweeps.recent, self._sweeps.step = keys, step
        return Lookup(rows, cold)

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Row numbers of `keys` (K,) int64, -1 where absent; adds and counts nothing."""
        self.in_flight.check("find")
        return self._rows.find(keys)

    def read(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Copies of the rows numbered `rows` (K,) int64, those of `keys` (K,): (K, row_width) float32.

        A row number of -1 reads as what the key's row would start from.
        """
        self.in_flight.check("read")
        values = self._rows.read(rows)
        absent = rows < 0
        if bool(absent.any()):
            values[absent] = self._rows.initial_rows(keys[absent])
        return values

    def round_cold(self, values: torch.Tensor, cold: torch.Tensor) -> None:
        """Round the `cold` (K,) bool rows of `values` (K, row_width), in place, to what 16 bits hold.

        Weights become float16 numbers and the state bfloat16 numbers, so that `write` keeps them exactly.

        Raises ValueError naming the row in `values` where a finite number does not fit.
        """
        here = cold.to(values.device).nonzero().squeeze(1)
        rows = values[here]
        half = rounded(rows, self.dim)
        bad = overflows(rows, half)
        if len(bad):
            row, column = bad[0].tolist()
            raise ValueError(
                f"{self._rows.names()}: row {int(here[row])} of the step's rows is cold, and "
                f"{float(rows[row, column])} in its column {column} does not fit 16 bits; {TOO_LARGE}"
            )
        values[here] = half

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `values` (K, row_width) float32 as the rows of `keys` (K,) int64, distinct.

        Keys without a row are skipped: the row was evicted meanwhile. Leave out keys that were not admitted
        in the step that changed them; a later lookup may have given them a row that starts afresh.

        Nothing is rounded: a cold row lies in 16 bits if these hold its values exactly, as they do after
        `round_cold`, and in float32 otherwise.
        """
        self.in_flight.check("write")
        self._rows.check_values(keys, values)
        with self._rows.copying:
            self._rows.store(keys, values)

    def erase(self, keys: torch.Tensor) -> torch.Tensor:
        """Erase the rows of `keys` (K,) int64, distinct, and what was counted of them.

        Returns:
            (K,) bool, whether the key had a row.
        """
        self.in_flight.check("erase")
        if self._candidates is not None:
            with self._rows.lock:
                self._candidates.forget(keys)
                self._counted.add(keys)
        return self._rows.erase(keys)

    # Everything at once.

    def export(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,) int64 in ascending order and their rows (n, row_width) float32, copied."""
        self.in_flight.check("export")
        with self._rows.copying:
            keys, rows = self._rows.items()
            return keys, self._rows.read(rows)

    def load(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add or overwrite the rows of distinct `keys` (n,) with `values` (n, row_width).

        New rows are cold, count as used by no step (lfu) or at the step of the next sweep (lru, ttl).
        """
        self.in_flight.check("load")
        self._rows.check_values(keys, values)
        with self._rows.copying:
            with self._rows.lock:
                self._rows.insert(keys)
                self._sweeps.unaged = True
                if self._candidates is not None:
                    self._candidates.forget(keys)
                    self._counted.add(keys)
            self._rows.store(keys, values)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """All that a restart needs, by group and column; each group has ``keys`` (n,) int64, ascending.

            rows         rows (n, row_width) float32; with eviction score (n,) int32; with heat
                         heat (n,) uint8; with either recent (n,) bool, used by the last lookup
            candidates   counts (n,) int32 and last (n,) int32, the last step that asked, only where
                         admission is above 1

        The states of all ranks together, divided by keys in any way, are the state of another world size.
        """
        self.in_flight.check("state")
        with self._rows.copying:
            keys, rows = self._rows.items()
            state = {"rows": self._columns(keys, rows)}
            if self._candidates is not None:
                with self._rows.lock:
                    state["candidates"] = self._candidates.columns(self._candidates.keys())
        return state

    def load_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Take over what `state` gave, all of it or a part by keys; keys already there are overwritten.

        Raises ValueError where its columns are not those of this table's policies.
        """
        self.in_flight.check("load_state")
        group, candidates = state.get("rows", {}), state.get("candidates", {})
        recent = ["recent"] if self._sweeps.timed else []
        _check_columns("rows", group, ["keys", "rows", *self._rows.full.notes, *recent])
        _check_columns(
            "candidates", candidates, ["keys", "counts", "last"] if self._candidates is not None else []
        )
        keys = group["keys"]
        self._rows.check_values(keys, group["rows"])
        with self._rows.copying:
            with self._rows.lock:
                rows, _inserted = self._rows.insert(keys)
                for name in self._rows.full.notes:
                    for store, here, local in self._rows.by_store(rows):
                        store.notes[name][local] = group[name][here]
                self._sweeps.unaged = True
                if self._sweeps.timed:
                    self._sweeps.recent = torch.cat([self._sweeps.recent, keys[group["recent"]]])
                if self._candidates is not None:
                    self._candidates.forget(keys)
                    self._candidates.load(candidates)
                    self._counted.add(torch.cat([keys, candidates["keys"]]))
            self._rows.store(keys, group["rows"])
        self._sweeps.step, self.in_flight.update = None, -1

    # What users read.

    def memory(self) -> dict[str, int]:
        """Bytes allocated on this rank, by what they are for, and bytes that cold rows do not take.

        key_structure, candidates (keys, counts and steps of what is not admitted yet), metadata (scores,
        heat, lists of free rows), fp32_values, fp16_values, saved_by_fp16 (of the rows in use).
        """
        half, waiting = self._rows.half, self._candidates
        return {
            "key_structure": self._rows.index.nbytes,
            "candidates": 0 if waiting is None else waiting.nbytes,
            "metadata": sum(store.note_bytes for store in self._rows.stores()),
            "fp32_values": self._rows.full.value_bytes,
            "fp16_values": 0 if half is None else half.value_bytes,
            "saved_by_fp16": 0 if half is None else 2 * self.row_width * len(half),
        }

    @property
    def metadata_bytes_per_key(self) -> float:
        """Bytes per key apart from its values: its share of the key structure, its score and its heat."""
        noted = sum(note.itemsize for note in self._rows.full.notes.values())
        return self._rows.index.nbytes / max(len(self), 1) + noted

    def take_evicted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,) and rows (n, row_width) evicted since the last call, if `Eviction.keep`; oldest first."""
        self.in_flight.check("take_evicted")
        return self._sweeps.take_evicted()

    def track_changes(self) -> None:
        """Note from now on what changes, for `take_changes`."""
        self.in_flight.check("track_changes")
        with self._rows.lock:
            self._rows.touched.start()
            self._counted.start()

    def take_changes(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        """What changed since the last call or `track_changes`.

        Returns:
            `state` of the keys that changed or came; by the same groups keys (n,) int64, ascending, that are
            there no longer. Without the keys of either, and with the entries of the first, the state of
            before is the state of now.
        """
        self.in_flight.check("take_changes")
        with self._rows.copying:
            with self._rows.lock:
                keys, counted = self._rows.touched.keys(), self._counted.keys()
                self._rows.touched.start()
                self._counted.start()
                rows = self._rows.index.find(keys)
                present = rows >= 0
            changed = {"rows": self._columns(keys[present], rows[present])}
            erased = {"rows": keys[~present]}
            if self._candidates is not None:
                with self._rows.lock:
                    present = self._candidates.has(counted)
                    changed["candidates"] = self._candidates.columns(counted[present])
                    erased["candidates"] = counted[~present]
        return changed, erased

    def _columns(self, keys: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Columns of `state` for `keys` (n,) and their row numbers; needs `copying`."""
        columns = {"keys": keys}
        with self._rows.lock:
            for name in self._rows.full.notes:
                columns[name] = self._rows.noted(name, rows)
            if self._sweeps.timed:
                columns["recent"] = torch.isin(rows, self._rows.index.find(self._sweeps.recent))
        columns["rows"] = self._rows.read(rows)
        return columns


def _check_columns(group: str, columns: dict[str, torch.Tensor], expected: list[str]) -> None:
    if columns.keys() != set(expected):
        raise ValueError(
            f"the state's {group} have columns {sorted(columns)}, this table's policy needs "
            f"{sorted(expected)}; was it saved under another policy? load() takes weights and optimizer state"
        )
