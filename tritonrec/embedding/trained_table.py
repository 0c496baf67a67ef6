"""Rows by key in training, and their policies: admission, eviction, tiers (MTGRBoost, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..distributed import CorruptionError
from ..kernels import launch
from ..kernels.checksums import row_checksums
from ..kernels.padding import report
from ..settings import check_number
from .candidates import Candidates
from .evictor import Evictor
from .in_flight import InFlight, WrittenRows, check_trainable
from .key_layout import KeyLayout
from .metadata import RowMetadata, RowPolicy
from .policy import Placement, TablePolicy
from .pools import Arriving
from .precision import AccessCounter, round_low
from .select import AllReduce
from .selection import select, valid
from .shared_state import StreamLock
from .snapshot import Snapshot
from .stored_table import StoredTable, make_table

BLOCK = 4096
"""Rows evicted or demoted under one lock; this bounds the wait of an update."""

State = dict[str, dict[str, torch.Tensor]]


class Lookup(NamedTuple):
    """The rows of a step's keys.

    handles: (K,) int64, -1 for a key that is not admitted, and behind the count. Valid until the second
        lookup after this one begins; evictions, moves and inserts in between do not change them.
    low_precision: (K,) bool, rows to store in 16 bits, False where not admitted; None without precision
        tiers.
    """

    handles: torch.Tensor
    low_precision: torch.Tensor | None


@dataclass
class Counters:
    """Rows and lookups of a table on this rank since it was made.

    found: keys looked up that had a row. inserted: rows made for new keys. rejected: lookups of keys that
    are not admitted yet. evicted: rows erased by eviction. promoted, demoted: rows moved to float32 and to 16
    bits; a new row moves at its first update. cached: rows looked up that were in a device's cache, or in the
    memory of a table on disk. disk_read, disk_written: rows read from a disk, and written to it.
    """

    found: int
    inserted: int
    rejected: int
    evicted: int
    promoted: int
    demoted: int
    cached: int
    disk_read: int
    disk_written: int


class TrainedTable:
    """Lookups, updates, erasures and policies of a `DynamicTable`, which adds what is saved and loaded."""

    def __init__(
        self,
        dim: int,
        row_width: int | None = None,
        *,
        layout: KeyLayout | None = None,
        seed: int = 0,
        scale: float | Sequence[float] = 0.05,
        slots: int = 1024,
        chunk_rows: int = 65536,
        policy: TablePolicy | None = None,
        placement: Placement | None = None,
    ):
        check_trainable()
        self.dim, self.row_width = dim, dim if row_width is None else row_width
        self.layout, self.seed = layout or KeyLayout(), seed
        names = self.layout.names
        self.scales = tuple(scale) if isinstance(scale, Sequence) else (scale,) * len(names)
        for each in self.scales:
            check_number("scale", each)
        if len(self.scales) != len(names) or (self.layout.dims and max(self.layout.dims) != dim):
            raise ValueError(f"{self.layout}: dim {dim} and scales {self.scales} are not those of its tables")
        self.policy = policy or TablePolicy()
        self.placement = placement or Placement()
        self._slots, self._chunk_rows = slots, chunk_rows
        self.in_flight = InFlight(str(self.layout))
        self.requires_grad = True  # else updates leave the rows as they are
        self._rank: int | None = None  # of a table with checksums, for errors
        self._begin(self.initial_rows)
        # of each logical table its number for `ops.initial_rows`, weights of a row, and scale
        dims = self.layout.dims or (dim,) * len(names)
        self._of_tables = (
            torch.tensor(self.layout.table_ids, dtype=torch.int64, device=self.device),
            torch.tensor(dims, dtype=torch.int64, device=self.device),
            torch.tensor(self.scales, dtype=torch.float32, device=self.device),
        )
        # keys found, inserted, rejected; rows evicted; of tables before this one: `_moves`
        self._looked_up, self._evicted = (
            torch.zeros(size, dtype=torch.int64, device=self.device if self.padded else "cpu")
            for size in (3, ())
        )
        self.written: WrittenRows | None = None  # of a table with copies on other ranks
        self._before = [0] * 5
        # `_updating` is held while rows that exist are updated, moved or erased; `_lock` briefly, for
        # metadata, candidates and counters. In this order.
        self._updating, self._lock = StreamLock(self.device), StreamLock(self.device)

    def _note_written(self, keys: torch.Tensor | None) -> None:
        if self.written is not None:
            self.written.add(keys)

    def _begin(self, initial_rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Make all that depends on rows, for a table without any."""
        policy, slots = self.policy, self._slots
        self._rows: StoredTable = make_table(
            self.placement, self.dim, self.row_width, initial_rows, slots, self._chunk_rows,
            bool(policy.precision),
        )  # fmt: skip
        self.device, self.padded = self._rows.device, self._rows.padded
        device = self.device if self.padded else None
        self._candidates: Candidates | None = None
        if policy.admission > 1:
            self._candidates = Candidates(policy.admission, policy.admission_window, slots, device)
        self._evictor = None
        if policy.eviction:
            self._evictor = Evictor(
                policy.eviction, self.layout, device, policy.eviction.rows_of(self.row_width)
            )
        self._precision = None
        if policy.precision:
            self._precision = AccessCounter(policy.precision, device, self.layout, self.row_width)
        policies = [each for each in (self._evictor, self._precision) if each is not None]
        self._metadata = RowMetadata(policies, device)
        self._snapshots: tuple[Snapshot, ...] = ()  # that are being read
        self._step: int | None = None  # of the last lookup, where policies go by steps
        self._foreseen: tuple[int, int, dict[RowPolicy, Arriving]] = -1, -1, {}  # flight, step, numbers

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def counters(self) -> Counters:
        """Rows and lookups on this rank since the table was made; waits for a device."""
        found, inserted, rejected = self._looked_up.tolist()
        return Counters(found, inserted, rejected, int(self._evicted), *self._moves())

    def _moves(self) -> list[int]:
        """`StoredTable.moves`, of the tables before this one too."""
        return [sum(each) for each in zip(self._before, self._rows.moves, strict=True)]

    def lookup(
        self,
        keys: torch.Tensor,
        step: int,
        all_reduce: AllReduce | None = None,
        count: torch.Tensor | None = None,
        bring: bool = True,
    ) -> Lookup:
        """Find the rows of a step's keys, and insert the new ones.

        First the passes due at this step evict and demote rows, except those of this lookup and of the last
        one, and forget keys that are not admitted yet. Then admitted keys get rows, and the access to all
        rows is recorded.

        Args:
            keys: (K,) int64, distinct.
            step: number of the step; below 2**31 with any policy, and ascending with eviction or precision
                tiers.
            all_reduce: sums an int64 tensor over the ranks that share the table, for eviction by capacity;
                None for a single rank. Each rank calls `lookup` in every step, also without keys.
            count: () int64, the number of valid keys, for a table that is `padded`.
            bring: also `bring` their rows; else the caller does, before the next lookup.
        """
        self.in_flight.check("lookup")
        self._check_device("keys", keys)
        if self._candidates is not None and not 0 <= step < 2**31:
            raise ValueError(f"{self.layout}: step must be in [0, 2**31) with admission, got {step}")
        # Before the insert: the pass makes room, and sees neither the step's new keys nor their accesses.
        if self._metadata.policies:
            self._run_policies(keys, step, all_reduce, count)
        with self._lock:
            if self._candidates is None:
                handles, new = self._insert(keys, count)
            else:
                handles, new = self._admit(self._candidates, keys, step, count)
            # Handles of erased rows stay reserved while a buffer has them, or a late write-back would reach
            # another key's row. This lookup has moved the buffers on: some of them are free now.
            self._rows.release(self._metadata.record(keys, handles, step))
            present = (handles >= 0).sum()
            rejected = (keys.shape[0] if count is None else count) - present
            self._looked_up += torch.stack([present - new, new, rejected])
            result = Lookup(handles, self.in_low_precision(handles))
        if bring:
            self.bring(handles)
        # The numbers that the next pass goes by are asked for now, a whole window before they are used.
        if self.padded and self.in_flight.active and self._metadata.policies:
            self._foresee(step + 1, all_reduce)
        return result

    def bring(self, handles: torch.Tensor) -> None:
        """Bring the rows of a lookup's `handles` (K,) where they are read fast: from a disk into memory, or
        to the device. Rows of neither this nor the last lookup leave for them.
        """
        self.in_flight.check("bring")
        self._rows.prefetch(handles)  # without the lock: updates do not wait for a disk

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Handles (K,) of `keys` (K,) int64, -1 where absent; inserts and counts nothing."""
        self.in_flight.check("find")
        self._check_device("keys", keys)
        return self._rows.find(keys)

    def gather(self, handles: torch.Tensor, keys: torch.Tensor, initial: bool = True) -> torch.Tensor:
        """Copies (K, row_width) float32 of the rows of `handles` (K,), which belong to `keys` (K,).

        A handle of -1 reads the initial row of its key; anything, without `initial`.
        """
        self.in_flight.check("gather")
        self._check_device("handles", handles)
        self._check_device("keys", keys)
        values = self._rows.gather(handles)
        if not initial:
            return values
        absent = handles < 0
        if self.padded:
            return torch.where(absent.unsqueeze(1), self.initial_rows(keys), values)
        if bool(absent.any()):
            values[absent] = self.initial_rows(keys[absent])
        return values

    def row_sums(self, keys: torch.Tensor) -> torch.Tensor:
        """(K,) int64 on the host: checksums of the rows of `keys` (K,), of an absent one's initial row."""
        sums = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for part in keys.to(self.device).split(1 << 16) if len(keys) else ():
            sums.append(row_checksums(self.gather(self.find(part), part)).cpu())
        return torch.cat(sums)

    @property
    def admits_all(self) -> bool:
        """Whether every key that is looked up has a row."""
        return self._candidates is None

    def initial_rows(self, keys: torch.Tensor) -> torch.Tensor:
        """Initial rows (K, row_width) float32 of `keys` (K,): weights by (seed, table name, id, column)."""
        values = torch.zeros(keys.shape[0], self.row_width, dtype=torch.float32, device=keys.device)
        table_ids = self.layout.table_ids
        if len(table_ids) == 1:
            values[:, : self.dim] = launch.initial_rows(self.seed, *table_ids, keys, self.dim, *self.scales)
        else:
            members, ids = self.layout.unpack(keys)
            tables, dims, scales = (each.to(keys.device)[members] for each in self._of_tables)
            values[:, : self.dim] = launch.initial_rows_of_tables(
                self.seed, tables, ids, dims, scales, self.dim
            )
        return values

    def round_low_precision(self, values: torch.Tensor, low_precision: torch.Tensor) -> None:
        """Round the `low_precision` (K,) bool rows of `values` (K, row_width), in place, to 16 bits.

        `update` then stores them exactly. Raises ValueError naming a row with a finite number that does not
        fit.
        """
        low = low_precision.to(values.device)
        values.copy_(
            round_low(
                values, low, self.dim,
                lambda row: f"{self.layout}: row {row} of the step's rows is in low precision",
            )
        )  # fmt: skip

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor | None:
        """(K,) bool, the rows of `handles` (K,) that an update stores in 16 bits; None without tiers."""
        return None if self._precision is None else self._precision.in_low_precision(handles)

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        """Overwrite the rows of `handles` (K,), distinct, with `values` (K, row_width) float32.

        A handle of -1 is skipped: a key that was not admitted. Nothing is rounded: a row in low precision is
        stored in 16 bits if these hold its values exactly, as they do after `round_low_precision`, and in
        float32 otherwise. Which rows are in low precision the lookup said (`Lookup.low_precision`); None:
        those that are now, which later lookups may have changed.
        """
        self.in_flight.check("update")
        self._note_written(None)
        self._check_device("handles", handles)
        self._check_device("values", values)
        self._check_values(handles.shape[0], values)
        self.in_flight.written += 1
        with self._updating:
            if all(each.settled for each in self._snapshots):
                self._update(handles, values, low_precision=low_precision)
            else:  # these rows are part of a snapshot, whose window's lookup has marked them as changed
                self._preserve(handles, settled=True)
                self._rows.update(handles, values, low_precision)

    def keep_checksums(self, rank: int) -> None:
        """Keep a checksum of every row from now on, 8 bytes each, which `validate_rows` compares.

        `export`, `state` and `take_changes` then raise `CorruptionError` for a row that has changed.

        Args:
            rank: this one, for errors.
        """
        self.in_flight.check("keep_checksums")
        with self._updating:
            self._rows.keep_checksums()
            self._rank = rank

    def validate_rows(
        self,
        handles: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        skipped: torch.Tensor | None = None,
        stored: StoredTable | None = None,
    ) -> None:
        """Raise `CorruptionError` naming a row of `values` (K, row_width) that is not as it was written.

        Rows of -1 are left out, and positions `skipped` (n,) int64, where -1 is no position. An error on a
        device is put off where errors are (`kernels.deferred`). `stored`: where they are read, of a snapshot.
        """
        if self._rank is None:
            return
        rank = self._rank
        first = (self._rows if stored is None else stored).first_changed(
            handles, values, handles[:0] if skipped is None else skipped
        )

        def error(code: int) -> CorruptionError:
            return CorruptionError(
                f"the row of {self.layout.describe(keys[code - 1])} on rank {rank} has other bits than "
                "when it was written: check the memory there, and go on from the last checkpoint",
                (rank,),
            )

        report(first, None, error, error)

    def erase(self, keys: torch.Tensor) -> torch.Tensor:
        """Erase the rows of `keys` (K,) int64, distinct; (K,) bool, whether the key had a row.

        Later updates of the old handle are dropped. Admission counts are erased too.
        """
        self.in_flight.check("erase")
        self._note_written(keys)
        self._check_device("keys", keys)
        with self._updating, self._lock:
            if self._candidates is not None:
                self._candidates.erase(keys)
            present = self._rows.find(keys) >= 0
            handles = self._erase(keys[present])
            self._rows.release(self._metadata.pinned.reserve(handles))
            return present

    def memory(self) -> dict[str, int]:
        """Bytes allocated on this rank, by purpose, and bytes saved by low precision.

        key_structure, candidates (keys, counts and steps of keys that are not admitted yet), metadata
        (scores, access counts, locations, free rows), fp32_values, fp16_values, saved_by_fp16 (rows in use),
        and disk, which are bytes of a file.
        """
        stored, candidates = self._rows.memory(), self._candidates
        stored["metadata"] += self._metadata.nbytes
        return {**stored, "candidates": 0 if candidates is None else candidates.nbytes}

    # The next four need `_lock`.

    def _insert(
        self, keys: torch.Tensor, count: torch.Tensor | None = None, initial: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Handles (K,) of `keys`, and () int64, the number of new ones."""
        handles, inserted = self._rows.find_or_insert(keys, count, initial)
        if self.padded:
            self._metadata.add(torch.where(inserted, handles, -1), keys, self._rows.end)
        else:
            new = inserted.nonzero().squeeze(1)
            if new.shape[0]:
                self._metadata.add(handles[new], keys[new], self._rows.end)
        return handles, inserted.sum()

    def _admit(
        self, candidates: Candidates, keys: torch.Tensor, step: int, count: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_insert` of the keys that have a row, or are admitted at `step`; -1 for the others."""
        candidates.forget(step)
        handles = self._rows.find(keys, count)
        # Two selections, one inside the other: absent keys, and those of them that are admitted now. `put`
        # writes the results back to the places they came from.
        absent = select((handles < 0) & valid(len(keys), count, self.device), self.padded)
        absent_keys = absent.take(keys)
        admitted = candidates.count(absent_keys, step, absent.count)
        own, new = self._insert(admitted.take(absent_keys), admitted.count)
        of_absent = torch.full_like(absent_keys, -1)
        admitted.put(of_absent, own)
        absent.put(handles, of_absent)
        return handles, new

    def _load(self, keys: torch.Tensor) -> torch.Tensor:
        """Handles (n,) of `keys` to load, which need no admission; no step has used new ones, and they hold
        anything.
        """
        handles, _new = self._insert(keys, initial=False)
        if self._evictor is not None:
            self._evictor.expect_missing_timestamps()
        if self._candidates is not None:
            self._candidates.erase(keys)
        return handles

    def _erase(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """Erase the rows of `keys` (K,), which have some; returns their handles (K,), still reserved."""
        if self._snapshots:
            # A save under way still owes these rows their values of the moment it began.
            self._preserve(self._rows.find(keys, count))
        handles = self._rows.erase(keys, count)
        self._metadata.remove(keys, handles >= 0, count)
        return handles

    def _preserve(self, handles: torch.Tensor, settled: bool = False) -> None:
        """Copy rows that snapshots, or those that are `settled`, have not read yet, before they change; needs
        `_updating`.
        """
        for snapshot in self._snapshots:
            if snapshot.settled or not settled:
                snapshot.preserve(handles)

    def _update(
        self,
        handles: torch.Tensor,
        values: torch.Tensor,
        keys: torch.Tensor | None = None,
        low_precision: torch.Tensor | None = None,
    ) -> None:
        """Store rows, those of `keys` (K,) where they are known; needs `_updating`."""
        self._preserve(handles)
        unknown = self._precision is not None and low_precision is None
        if self._metadata.changes.active or unknown:  # a turn costs the overlap: see `StreamLock`
            with self._lock:
                self._metadata.changes.mark(handles, keys)
                if unknown:
                    low_precision = self.in_low_precision(handles)
        self._rows.update(handles, values, low_precision)

    def _run_policies(
        self, keys: torch.Tensor, step: int, all_reduce: AllReduce | None, count: torch.Tensor | None
    ) -> None:
        """Run the eviction and demotion passes due at `step`, before the lookup of its `keys` (K,)."""
        if not 0 <= step < 2**31 or (self._step is not None and step <= self._step):
            raise ValueError(
                f"{self.layout}: lookup of step {step} after step {self._step}; a table with eviction or "
                "precision tiers takes one lookup per step, in ascending order"
            )
        self._step = step
        if not any(policy.due(step) for policy in self._metadata.policies):
            return
        # their rows are in the pipeline's two buffers
        pinned = torch.cat([self._metadata.pinned.last, self._rows.find(keys, count)])
        demoting = self._precision if self._precision is not None and self._precision.due(step) else None
        most: list[int] = []
        if demoting is not None:  # before rows are evicted, which a device could not foresee
            most = self._number(demoting, step, all_reduce) or [0, *demoting.too_many(all_reduce).tolist()]
        if self._evictor is not None and self._evictor.due(step):
            self._evict(self._evictor, pinned, step, all_reduce)
        if demoting is not None:
            self._demote(demoting, pinned, most, all_reduce)

    def _evict(self, evictor: Evictor, pinned: torch.Tensor, step: int, all_reduce: AllReduce | None) -> None:
        with self._lock:
            self._metadata.changes.mark(evictor.stamp(self._rows, step))
        most = self._number(evictor, step, all_reduce)
        if most is not None and not any(most):
            return
        keys, count = evictor.choose(self._rows, pinned, step, most, all_reduce)
        for first, part in zip(range(0, len(keys), BLOCK), keys.split(BLOCK), strict=False):
            here = None if count is None else (count - first).clamp(0, len(part))
            with self._updating, self._lock:
                self._rows.release(self._erase(part, here), here)
        self._evicted += len(keys) if count is None else count

    def _demote(
        self,
        precision: AccessCounter,
        pinned: torch.Tensor,
        most: list[int],
        all_reduce: AllReduce | None,
    ) -> None:
        """Halve the access counts, and store in 16 bits the rows that are below the threshold now."""
        with self._lock:
            if self._metadata.changes.active:
                # Halving changes the access count of every row that has
                # one: all of these are in the next checkpoint of changes.
                self._metadata.changes.mark(precision.used())
            precision.halve()
        keys, handles = precision.choose(self._rows, pinned, most, all_reduce)
        for part_keys, part in zip(keys.split(BLOCK), handles.split(BLOCK), strict=True):

            def describe(row: int, keys: torch.Tensor = part_keys) -> str:
                return f"the row of {self.layout.describe(keys[row])} is due for low precision"

            with self._updating:
                rows = round_low(self._rows.gather(part), part >= 0, self.dim, describe)
                self._update(part, rows, part_keys, part >= 0)

    def _foresee(self, step: int, all_reduce: AllReduce | None) -> None:
        """Send to the host what the passes at `step` go by, if that is the next lookup's.

        In a flight nothing but lookups adds or erases rows, on any rank.
        """
        in_buffers = self._metadata.pinned.in_buffers
        numbers = {
            policy: policy.foresee(self._rows, step, in_buffers, all_reduce)
            for policy in self._metadata.policies
            if policy.due(step)
        }
        self._foreseen = self.in_flight.number, step, numbers

    def _number(self, policy: RowPolicy, step: int, all_reduce: AllReduce | None) -> list[int] | None:
        """What the pass of a `policy` goes by: foreseen in the last lookup, or found now, with a wait; None
        for a table that is not padded.
        """
        if not self.padded:
            return None
        flight, foreseen, numbers = self._foreseen
        # Between flights rows may be loaded or erased, and
        # another step may come than the one that was foreseen.
        if (flight, foreseen) != (self.in_flight.number, step) or not self.in_flight.active:
            in_buffers = self._metadata.pinned.in_buffers
            return policy.foresee(self._rows, step, in_buffers, all_reduce).take()
        return numbers[policy].take()

    def _check_device(self, name: str, values: torch.Tensor) -> None:
        if values.device != self.device:
            raise ValueError(f"{self.layout} is on {self.device}, got {name} on {values.device}")

    def _check_values(self, count: int, values: torch.Tensor) -> None:
        if values.shape != (count, self.row_width) or values.dtype != torch.float32:
            raise ValueError(
                f"{self.layout}: rows of shape {tuple(values.shape)} {values.dtype} do not fit {count} keys "
                f"of a table whose rows hold {self.row_width} float32 values; were they saved with another "
                "optimizer or dimension?"
            )
