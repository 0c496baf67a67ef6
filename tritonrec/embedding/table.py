"""A table of rows by key that is saved and loaded: whole, in parts beside training, or as changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from .change_log import CHECKPOINT
from .in_flight import InFlight
from .shared_state import StreamLock
from .snapshot import Snapshot
from .state_check import check_distinct, check_state
from .trained_table import TrainedTable

State = dict[str, dict[str, torch.Tensor]]

PIECE = 1 << 15
"""Rows read at a time where only their weights are kept."""


class DynamicTable(TrainedTable):
    """Rows (weights and optimizer state) by int64 key; any of the 2**64 keys is legal.

    A `StoredTable` stores the rows; each policy is an object of its own. A new key gets weights that are
    a function of (seed, table, key, column), and zero state: the order of arrival, the rank, a restart or an
    eviction do not change them. Policies depend on step numbers and keys only.

    Threads: `lookup` of step t may run beside `update` of step t - 1, each on one thread and in the order of
    the steps, after the update of step t - 2. While a trainer has windows in flight only its lanes read and
    write rows; other threads get a RuntimeError, except for `counters`, `memory` and ``len``.

    Args:
        dim: weights per row.
        row_width: float32 values per row, at least `dim`.
        layout: logical tables merged into this one; by default one, whose keys are its ids.
        seed: of the initial values.
        scale: initial weights are uniform in [-scale, scale).
        slots: initial slots of the key structure, a power of two.
        chunk_rows: rows of one value chunk.
        policy: eviction, admission and precision tiers; none by default.
        placement: host memory, device memory or both; host memory by default. A lookup on a device waits for
            nothing, but a pass that evicts or demotes rows for their number: while windows are in flight that
            of the lookup before it, which is mostly over by then.
    """

    def export(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,) int64 in ascending order and their rows (n, row_width) float32, copied to the host."""
        self.in_flight.check("export")
        with self._updating:
            keys, handles = self._items()
            rows = self._rows.gather(handles)
            self.validate_rows(handles, keys, rows)
            return keys.cpu(), rows.cpu()

    def load(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add or overwrite the rows of distinct `keys` (n,) with `values` (n, row_width).

        New rows have no access yet (lfu, precision tiers), or the step of the next eviction pass as their
        last one (lru, ttl). Raises ValueError for a key that is given twice.
        """
        self.in_flight.check("load")
        self._note_written(keys)
        self._check_values(len(keys), values)
        check_distinct(keys, "the rows to load")
        with self._whole_rows(keys.to(self.device)):
            self._load_state({"rows": {"keys": keys, "rows": values}})

    def keys(self) -> torch.Tensor:
        """(n,) int64, ascending."""
        self.in_flight.check("keys")
        with self._updating:
            return self._items()[0]

    def state(self, optimizer: bool = True) -> State:
        """Complete state by group and column, on the host; each group has ``keys`` (n,) int64, ascending.

        Without `optimizer` rows are (n, dim), their weights alone.

            rows         rows (n, row_width) float32; with eviction score (n,) int32; with precision tiers
                         heat (n,) uint8, the access counts; with either recent (n,) bool, used by the last
                         lookup
            candidates   counts (n,) int32 and last (n,) int32, the last step that looked the key up, only
                         where admission is above 1

        The union of all ranks' states, split by keys in any way, is the state of another world size.
        """
        self.in_flight.check("state")
        with self._updating:
            state = {"rows": self._columns(*self._items(), None if optimizer else self.dim)}
            if self._candidates is not None:
                with self._lock:
                    state["candidates"] = self._candidates.state()
        return _on_host(state)

    def snapshot(self, settled: bool = True) -> tuple[Snapshot, torch.Tensor, torch.Tensor, State]:
        """`state` of this moment in host memory, whose rows are read while updates go on.

        Args:
            settled: False from a lookup, before the next one: updates up to that of its window belong to the
                snapshot, and `settle` says when they are done. No row is read before.

        Returns:
            the rows, their keys (n,) int64 and handles (n,) int32 in no particular order, and the `state`
            without the rows.
        """
        self.in_flight.check("snapshot")
        with self._updating:
            keys, handles = self._rows.items(torch.int32)
            with self._lock:
                metadata = self._metadata.copy(self._rows.end)
                rest = {} if self._candidates is None else {"candidates": self._candidates.state()}
            metadata = {name: values.cpu() for name, values in metadata.items()}
            return self._snapshot(metadata, settled), keys.cpu(), handles.cpu(), _on_host(rest)

    def snapshot_of_changes(
        self, reader: str = CHECKPOINT, settled: bool = True
    ) -> tuple[Snapshot, torch.Tensor, torch.Tensor, State, dict[str, torch.Tensor]]:
        """`take_changes` of this moment in host memory, whose rows are read while updates go on.

        Returns:
            as `snapshot`, of the changed and new keys alone, and the erased keys.
        """
        self.in_flight.check("snapshot_of_changes")
        with self._updating:
            with self._lock:
                keys, handles, rest, erased = self._take_changes(reader)
                metadata = self._metadata.read_by_handle(handles, self._rows.end)
            return self._snapshot(metadata, settled, handles), keys, handles.int(), rest, erased

    def settle(self) -> None:
        """The rows of the window that was looked up before a `snapshot` are written: it has no later ones."""
        with self._updating:
            for each in self._snapshots:
                each.settled = True

    def _snapshot(
        self, metadata: dict[str, torch.Tensor], settled: bool, handles: torch.Tensor | None = None
    ) -> Snapshot:
        check = partial(self.validate_rows, stored=self._rows)
        made = Snapshot(
            self._rows, self.row_width, metadata, self._updating, check, self._close, handles, settled
        )
        self._snapshots += (made,)
        return made

    def _close(self, snapshot: Snapshot) -> None:
        self._snapshots = tuple(each for each in self._snapshots if each is not snapshot)

    def empty_state(self) -> State:
        """`state` of no rows: the columns that `load_state` takes."""
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        state = {"rows": self._columns(none, none)}
        if self._candidates is not None:
            state["candidates"] = self._candidates.read(none, none)
        return _on_host(state)

    def load_state(self, state: State) -> None:
        """Load a `state`, or the part of it of some keys; rows that exist are overwritten.

        Raises ValueError naming the columns that do not fit this table's policies, or a key given twice.
        """
        self.in_flight.check("load_state")
        check_state(state, self.empty_state())
        self._note_written(state["rows"]["keys"])
        self._check_values(len(state["rows"]["keys"]), state["rows"]["rows"])
        with self._lock:
            self._rows.grow(len(state["rows"]["keys"]))
        with self._whole_rows(state["rows"]["keys"].to(self.device)):
            self._load_state(state)
        self._step, self.in_flight.update = None, -1

    @contextmanager
    def _whole_rows(self, keys: torch.Tensor) -> Iterator[None]:
        """Where the block fails, new rows of `keys` (n,), which may have no values, are erased again."""
        new = keys[self._rows.find(keys) < 0]
        try:
            yield
        except BaseException:
            self.erase(new)
            raise

    def _load_state(self, state: State) -> None:
        here = {
            group: {name: values.to(self.device) for name, values in columns.items()}
            for group, columns in state.items()
        }
        if "rows" in here:
            rows = here["rows"]
            with self._updating:
                with self._lock:
                    handles = self._load(rows["keys"])
                    if "recent" in rows:  # that of policies, which rows alone do not have
                        self._metadata.restore(handles, rows)
                    low = None if self._precision is None else self._precision.loaded_low(handles)
                self._update(handles, rows["rows"], rows["keys"], low)
        if self._candidates is not None and "candidates" in here:
            with self._lock:
                self._candidates.load(here["candidates"])

    def successor(self, rows: int = 0) -> DynamicTable:
        """A table like this one without rows, sized for `rows`, for `adopt` to take its rows."""
        # A copy shares layout and policies. Guard, locks, rows and metadata are made anew below.
        made = copy.copy(self)
        made.in_flight = InFlight(str(self.layout))
        made._updating, made._lock = StreamLock(self.device), StreamLock(self.device)
        made._begin(self.initial_rows)
        if self._rank is not None:
            made._rows.keep_checksums()
        for reader in self._metadata.changes.readers:
            made.track_changes(reader)
        made._rows.grow(rows)
        return made

    def add_part(self, state: State) -> None:
        """Add a part of a `state` to a `successor`: of some keys, ``rows`` before ``candidates``.

        Raises ValueError for a key that was there already.
        """
        for group, columns in state.items():
            before, given = self._count_of(group), len(columns["keys"])
            self._load_state({group: columns})
            # A key that was there took an old row, so the count grew by less.
            if self._count_of(group) - before < given:
                raise ValueError(f"a key of {self.layout} is given twice in its {group}: give every row once")

    def _count_of(self, group: str) -> int:
        return len(self) if group == "rows" else len(self._candidates or ())

    def adopt(self, other: DynamicTable) -> None:
        """Take the rows of a `successor`, and no others; the log of changes has both."""
        self.in_flight.check("adopt")
        self._note_written(None)
        with self._updating, self._lock:
            if self._metadata.changes.active:
                # The log of `other` has its rows as new; those of before are noted as erased beside them.
                other._metadata.changes.erase(self._rows.items()[0])
                other._metadata.changes.continue_from(self._metadata.changes)
                if self._candidates is not None and other._candidates is not None:
                    other._candidates.erase(self._candidates.state()["keys"])
            self._before = self._moves()
            self._rows, self._metadata, self._candidates = other._rows, other._metadata, other._candidates
            self._evictor, self._precision = other._evictor, other._precision
            self._snapshots, self._foreseen = (), (-1, -1, {})
        self._step, self.in_flight.update = None, -1

    def track_changes(self, reader: str = CHECKPOINT) -> None:
        """Log changes from now on, for `take_changes` of the same `reader`."""
        self.in_flight.check("track_changes")
        with self._updating, self._lock:
            self._metadata.changes.restart(self._rows, reader)
            if self._candidates is not None and reader == CHECKPOINT:
                self._candidates.track_changes()

    def forget_changes(self, reader: str) -> None:
        """Log nothing for this `reader` any more."""
        with self._updating, self._lock:
            self._metadata.changes.stop(reader)

    def take_changes(self, reader: str = CHECKPOINT) -> tuple[State, dict[str, torch.Tensor]]:
        """Changes since the last call or `track_changes` of this `reader`.

        ``"candidates"`` are of checkpoints alone.

        Returns:
            `state` of changed and new keys, and by the same groups the erased keys (n,) int64, ascending.
            The previous state, without the keys of both and with the entries of the first, is the current
            state.
        """
        self.in_flight.check("take_changes")
        with self._updating:
            with self._lock:
                keys, handles, rest, erased = self._take_changes(reader)
            state = {"rows": self._columns(keys, handles), **rest}
        return _on_host(state), {group: keys.cpu() for group, keys in erased.items()}

    def _take_changes(self, reader: str) -> tuple[torch.Tensor, torch.Tensor, State, dict[str, torch.Tensor]]:
        """Keys and handles (n,) of changed rows, the changes of other groups, and the erased keys."""
        keys, handles, gone = self._metadata.changes.take(self._rows, reader)
        if self._candidates is None or reader != CHECKPOINT:
            return keys, handles, {}, {"rows": gone}
        candidates, erased = self._candidates.take_changes()
        return keys, handles, {"candidates": candidates}, {"rows": gone, "candidates": erased}

    def _items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,) in ascending order and their handles (n,)."""
        keys, handles = self._rows.items()
        keys, order = keys.sort()
        return keys, handles[order]

    def _columns(
        self, keys: torch.Tensor, handles: torch.Tensor, width: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Columns of `state` for `keys` (n,) and their handles (n,), of each row the first `width` values;
        needs `_updating`.
        """
        with self._lock:
            columns = self._metadata.read(handles)
        if width is None or width == self.row_width:
            rows = self._rows.gather(handles)
            self.validate_rows(handles, keys, rows)
            return {"keys": keys, **columns, "rows": rows}
        rows = torch.empty(len(keys), width, dtype=torch.float32, device=self.device)
        # A file is read once, in its order.
        piece = max(1, len(keys)) if self.placement.path else PIECE
        for some, here, out in zip(keys.split(piece), handles.split(piece), rows.split(piece), strict=True):
            whole = self._rows.gather(here)
            self.validate_rows(here, some, whole)
            out.copy_(whole[:, :width])
        return {"keys": keys, **columns, "rows": rows}


def _on_host(state: State) -> State:
    return {
        group: {name: values.cpu() for name, values in columns.items()} for group, columns in state.items()
    }
