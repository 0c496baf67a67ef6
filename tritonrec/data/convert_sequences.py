"""A log as users' sequences in Parquet (`tritonrec.data.sequences`), in memory for a part of it only.

Rows are dealt to buckets by a hash of the user, in scratch files; a bucket is then sorted and written. So the
memory is that of the largest bucket, and of the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tritonrec.data.event_log import EventLog
from tritonrec.data.interactions import Interactions
from tritonrec.data.log_format import LogFormat
from tritonrec.data.parquet import concat, table_of
from tritonrec.data.sequences import CATALOGUE_FILE
from tritonrec.files import ScratchFolder
from tritonrec.kernels.launch import random_indices

BUCKET_ROWS, MOST_BUCKETS = 4_000_000, 512
"""A bucket is an open file."""
DEALT_ROWS = 1 << 20
"""Rows that are dealt at once; few at a time would make many small row groups in every bucket."""
PAGES = {"data_page_size": 1 << 16, "write_page_checksum": True}
"""A reader of a stream holds a page of each column."""


def write_sequences(
    log: Iterable[Interactions],
    out: Path,
    rows_per_file: int,
    rows_per_group: int,
    report: Callable[[int], None] = lambda rows: None,
    buckets: int = 1,
) -> None:
    """Write the parts of a log, in their order, into the empty folder `out`, a row for each user.

    Features of users and items are left out.

    Args:
        rows_per_file, rows_per_group: largest number of users of a file, and of a row group.
        report: called with the numbers of interactions that are dealt to buckets.
        buckets: users are divided into so many, and one is in memory at a time.
    """
    items, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    files = 0
    for _, own in by_user(log, out, buckets, report):
        found, times = _trained(own)
        both = np.concatenate([items, found])
        items, places = np.unique(both, return_inverse=True)
        counts = np.bincount(places, np.concatenate([counts, times]), len(items)).astype(np.int64)
        table = _rows(own)
        for first in range(0, len(table), rows_per_file):
            file = out / f"part-{files:05}.parquet"
            part = table.slice(first, rows_per_file)
            pq.write_table(part, file, row_group_size=rows_per_group, **PAGES)
            files += 1
    pq.write_table(pa.table({"item": items, "count": counts}), out / CATALOGUE_FILE, write_page_checksum=True)


def buckets_of(rows: int) -> int:
    """Buckets for a log of so many rows."""
    return min(-(-rows // BUCKET_ROWS), MOST_BUCKETS)


def by_user(
    log: Iterable[Interactions], beside: Path, buckets: int, report: Callable[[int], None]
) -> Iterator[tuple[int, Interactions]]:
    """The rows of a log in buckets by a hash of the user, with their numbers; none without rows.

    Rows of a bucket are in the order of the log. They wait in scratch files beside a folder, and one bucket
    is in memory at a time; where there is but one, it is in memory alone.
    """

    def parts() -> Iterator[Interactions]:
        for rows in _joined(log):
            yield rows
            report(len(rows))

    if buckets == 1:
        yield 0, concat(list(parts()))
        return
    with ScratchFolder(f".{beside.name}-", beside.parent) as folder:
        for bucket, file in _dealt(parts(), Path(folder), buckets):
            own = concat(list(EventLog(str(file), LogFormat(time_unit="step"), "parquet").parts()))
            has_fraction = own.fraction is not None and bool(own.fraction.any())
            yield bucket, own if has_fraction else replace(own, fraction=None)


def _dealt(parts: Iterable[Interactions], folder: Path, buckets: int) -> list[tuple[int, Path]]:
    """Write the rows of buckets into files of a folder; the numbers and files of those that have rows."""
    files = {bucket: folder / f"{bucket}.parquet" for bucket in range(buckets)}
    writers: dict[int, pq.ParquetWriter] = {}
    with ExitStack() as stack:
        for rows in parts:
            users = torch.from_numpy(rows.user.copy())  # Arrow's memory is read-only
            which = random_indices(0, 0, 0, users, torch.zeros_like(users), 1, buckets)[:, 0].numpy()
            table = table_of(replace(rows, time_unit=""), has_fraction=True)
            for bucket in np.unique(which).tolist():
                if bucket not in writers:
                    writers[bucket] = stack.enter_context(
                        pq.ParquetWriter(files[bucket], table.schema, write_page_checksum=True)
                    )
                writers[bucket].write_table(table.take((which == bucket).nonzero()[0]))
    return [(bucket, files[bucket]) for bucket in sorted(writers)]


def _joined(log: Iterable[Interactions]) -> Iterator[Interactions]:
    """The parts of a log, several as one where they are small."""
    waiting: list[Interactions] = []
    for rows in log:
        waiting.append(rows)
        if sum(map(len, waiting)) >= DEALT_ROWS:
            yield concat(waiting)
            waiting = []
    if waiting:
        yield concat(waiting)


def _trained(log: Interactions) -> tuple[np.ndarray, np.ndarray]:
    """The items that users' training sequences have, ascending, and how often."""
    sequences = log.sequences
    last = sequences.offsets[1:][sequences.lengths >= 2] - 1
    return np.unique(np.delete(sequences.items, last), return_counts=True)


def _rows(log: Interactions) -> pa.Table:
    """A row for each user."""
    sequences = log.sequences
    offsets = pa.array(sequences.offsets, pa.int64())
    lists: dict[str, Any] = {"item": sequences.items, "timestamp": sequences.timestamps}
    if log.rating is not None:
        lists["rating"] = log.rating[sequences.rows]
    lists |= {name: column[sequences.rows].astype(bool) for name, column in log.feedback.items()}
    columns = {
        name: pa.LargeListArray.from_arrays(offsets, pa.array(values)) for name, values in lists.items()
    }
    return pa.table({"user": sequences.user_ids, **columns})
