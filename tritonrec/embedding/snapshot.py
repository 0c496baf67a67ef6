"""The rows of a table at one moment, read part by part while training goes on.

A snapshot has keys and handles, 12 bytes a row, and no values. A row is read with its part, or copied just
before it is updated or erased, whichever comes first::

    snapshot of 2 7 9     update of 7        read of the part of 2 and 7     update of 2     read of 9
    pending     2 7 9     copies 7   2 9     2 from the table, 7: copy  9    copies nothing  from the table
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import numpy as np
import torch

from .key_index import KeyIndex
from .key_layout import KeyLayout
from .row_file import RowFile
from .row_storage import RowStorage
from .stored_table import StoredTable

READ = 8192
"""Rows read under one lock; this bounds the wait of an update."""

SORTED = 1 << 18
"""Keys put into the order of the parts at a time; more would take more memory."""

COPIED = 1 << 25
"""Bytes of rows of a file that are put into this order at a time."""


# Rows in a file are read once, in its order. Parts are by hash, so every part has rows of nearly every page,
# and a table larger than the page cache would be read a page for each row. A stretch of the file goes to a
# copy, its rows by part, and each part then reads a piece of each stretch::
#
#     file   2 7 5 9 | 4 1 8 3      copy   2 5 7 9 | 1 4 3 8      part of 1 to 5   2 5, 1 4 3
#                                          part: a a b b | a a a b


class Snapshot:
    """Rows of one table in host memory that are still to be read, and copies of those updated since.

    Args:
        rows: of the table, all of which are to be read. row_width: of its values.
        metadata: by column the values (end,) by handle.
        turn: taken by a read, and held by who calls `preserve`.
        check: raises where rows of some handles, keys and values are damaged.
        closed: is called once no row is copied any more.
        handles: (n,) of those that are to be read; all by default.

    Attributes:
        settled: no window that was looked up before is still to be written: its rows would be part of this.
    """

    def __init__(
        self,
        rows: StoredTable,
        row_width: int,
        metadata: Mapping[str, torch.Tensor],
        turn: AbstractContextManager[object],
        check: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
        closed: Callable[[Snapshot], None],
        handles: torch.Tensor | None = None,
        settled: bool = True,
    ):
        self.settled = settled
        self.row_width, self.metadata = row_width, metadata
        self._rows, self._turn, self._check, self._closed = rows, turn, check, closed
        self._pending = np.zeros(rows.end + 1, bool)  # by handle, in use or not; the last is of -1 and newer
        self._pending[slice(rows.end) if handles is None else handles.numpy()] = True
        self._places = KeyIndex()  # of the copies, by handle
        self._copies = RowStorage(row_width, row_width, READ)
        self._readers = 0
        self._kept = threading.local()

    def by_table(
        self, layout: KeyLayout, keys: torch.Tensor, handles: torch.Tensor
    ) -> dict[str, SnapshotRows]:
        """As `KeyLayout.by_table`, for the rows, whose keys (n,) int64 and handles (n,) int32 these are."""
        tables = {}
        for member, name in enumerate(layout.names):
            ids, own = keys, handles
            if layout.bits:
                members, ids = layout.unpack(keys)
                ids, own = ids[members == member], handles[members == member]
            tables[name] = SnapshotRows(self, ids, own, layout, member)
        self._readers += len(tables)
        return tables

    def preserve(self, handles: torch.Tensor) -> None:
        """Copy those rows of `handles` (K,), or -1, that are still to be read: they are about to change."""
        # Called by an update with `_updating` held, and so is
        # each `read`: a row is either read or copied, never torn.
        handles = handles.cpu()
        own = handles[torch.from_numpy(self._is_pending(handles.numpy()))]
        if len(own):
            places, _new = self._places.find_or_insert(own)
            self._copies.add(places, self._places.end)
            self._copies.update(places, self._gather(own))
            self._pending[own.numpy()] = False

    def read(self, keys: torch.Tensor, handles: torch.Tensor) -> torch.Tensor:
        """Rows (K, row_width) float32 of `keys` (K,) and their `handles` (K,) int64; once for each.

        They last until the thread's next call: memory that comes and goes makes threads wait for each other.
        """
        kept = getattr(self._kept, "values", None)
        if kept is None or len(kept) < len(handles):
            kept = self._kept.values = torch.empty(
                len(handles) * 9 // 8, self.row_width, dtype=torch.float32, device="cpu"
            )
        values = kept[: len(handles)]
        for keys_here, here, out in zip(
            keys.split(READ), handles.split(READ), values.split(READ), strict=True
        ):
            with self._turn:
                pending = torch.from_numpy(self._is_pending(here.numpy()))
                # Rows that were updated meanwhile come with newer
                # values here; their copies overwrite these below.
                self._gather(here, out)
                if bool(pending.all()):
                    self._check(here, keys_here, out)
                else:
                    self._check(here[pending], keys_here[pending], out[pending])
                    out[~pending] = self._copies.gather(self._places.find(here[~pending]))
                self._pending[here.numpy()] = False
        return values

    def spool(self, rows: int) -> RowFile | None:
        """See `StoredTable.spool`."""
        return self._rows.spool(rows)

    def close(self) -> None:
        """One of its readers has ended."""
        self._readers -= 1
        if not self._readers:
            with self._turn:
                self._closed(self)

    def _gather(self, handles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows (K, row_width) of the table in host memory, in `out` if given."""
        device = self._rows.device
        if device.type == "cpu":
            return self._rows.gather(handles, out)
        values = self._rows.gather(handles.to(device)).cpu()
        return values if out is None else out.copy_(values)

    def _is_pending(self, handles: np.ndarray) -> np.ndarray:
        return self._pending[np.minimum(handles, len(self._pending) - 1)]


class SnapshotRows:
    """Rows of one logical table for `checkpoint.save`, as `checkpoint.rows.Rows`."""

    def __init__(
        self,
        snapshot: Snapshot,
        ids: torch.Tensor,
        handles: torch.Tensor,
        layout: KeyLayout,
        member: int,
    ):
        self._snapshot, self._ids, self._handles = snapshot, ids.numpy(), handles.numpy()
        self._layout, self._member = layout, member
        self.like: Mapping[str, torch.Tensor] = {
            "keys": ids[:0],
            **{name: values[:0] for name, values in snapshot.metadata.items()},
            "rows": self._narrowed(torch.empty(0, snapshot.row_width, dtype=torch.float32, device="cpu")),
        }
        self._bounds: list[list[int]] = []  # where the parts begin in each stretch
        self._copy: RowFile | None = None  # of the rows in their new order

    def __len__(self) -> int:
        return len(self._ids)

    def arrange(self, sort: Callable[[torch.Tensor], tuple[np.ndarray, list[int]]]) -> None:
        """See `checkpoint.rows.Rows`."""
        self._copy, stretch = self._snapshot.spool(len(self)), SORTED
        if self._copy is not None:
            stretch = max(1, COPIED // self._copy.row_bytes)
            self._order_by_handle()
        for start in range(0, len(self), stretch):
            ids, handles = (each[start : start + stretch] for each in (self._ids, self._handles))
            order, bounds = sort(torch.from_numpy(ids))
            if self._copy is not None:
                keys, places = self._pack(torch.from_numpy(ids)), torch.from_numpy(handles.astype(np.int64))
                rows = torch.from_numpy(np.take(self._snapshot.read(keys, places).numpy(), order, axis=0))
                here = torch.arange(len(rows), dtype=torch.int64, device="cpu")
                self._copy.write(start + here, rows, here)
            ids[:], handles[:] = np.take(ids, order), np.take(handles, order)
            self._bounds.append([start + bound for bound in bounds])

    def keys(self, part: int) -> torch.Tensor:
        """See `checkpoint.rows.Rows`."""
        return torch.from_numpy(self._of(part, self._ids))

    def read(self, part: int, order: np.ndarray) -> dict[str, torch.Tensor]:
        """See `checkpoint.rows.Rows`."""
        ids, handles = (np.take(self._of(part, each), order) for each in (self._ids, self._handles))
        keys, places = torch.from_numpy(ids), torch.from_numpy(handles.astype(np.int64))
        columns = {
            name: torch.from_numpy(values.numpy()[handles])
            for name, values in self._snapshot.metadata.items()
        }
        if self._copy is None:
            rows = self._narrowed(self._snapshot.read(self._pack(keys), places))
            return {"keys": keys, **columns, "rows": rows}
        copied = torch.empty(len(ids), self._snapshot.row_width, dtype=torch.float32, device="cpu")
        places = torch.cat(
            [torch.arange(at[part], at[part + 1], dtype=torch.int64, device="cpu") for at in self._bounds]
        )
        self._copy.read(places, copied, torch.arange(len(ids), dtype=torch.int64, device="cpu"))
        rows = self._narrowed(torch.from_numpy(np.take(copied.numpy(), order, axis=0)))
        return {"keys": keys, **columns, "rows": rows}

    def close(self) -> None:
        """See `checkpoint.rows.Rows`."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None
        self._snapshot.close()

    def _pack(self, ids: torch.Tensor) -> torch.Tensor:
        return self._layout.pack(self._member, ids, self._layout.names[self._member])

    def _narrowed(self, rows: torch.Tensor) -> torch.Tensor:
        return self._layout.narrowed(self._member, rows)

    def _order_by_handle(self) -> None:
        """As the rows lie in the file, a few at a time: training waits while numpy moves some."""
        end = int(self._handles.max()) + 1
        ids, used = np.empty(end, np.int64), np.zeros(end, bool)
        for start in range(0, len(self), SORTED):
            here = self._handles[start : start + SORTED]
            ids[here], used[here] = self._ids[start : start + SORTED], True
        at = 0
        for start in range(0, end, SORTED):
            here = np.flatnonzero(used[start : start + SORTED]) + start
            self._handles[at : at + len(here)], self._ids[at : at + len(here)] = here, ids[here]
            at += len(here)

    def _of(self, part: int, values: np.ndarray) -> np.ndarray:
        none = values[:0]
        return np.concatenate([none, *(values[at[part] : at[part + 1]] for at in self._bounds)])
