"""Windows of impressions as Parquet (`tritonrec.data.impression_stream`), in memory for a part of it only.

::

    OUT/part-00000.parquet     context_user_id, ...         an integer for each contextual feature
    OUT/part-00001.parquet     item, action, timestamp      lists of integers: the history
                               shown, shown_timestamp       lists of integers: the exposed items
                               label                        list of integers: exposed items by tasks
    OUT/_held_out.parquet      the same, the windows for test, by default the last one of each user
    OUT/_validation.parquet    the same, the windows for validation, if there are any
    OUT/_windows.json          names of the context and the tasks; the rule of the labels
    OUT/_items.parquet         genres of items, if there are any

The windows are those that `tritonrec.data.impression_loader` cuts, each with its history.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from tritonrec.data.convert_sequences import PAGES, by_user
from tritonrec.data.impression_loader import ImpressionLoader
from tritonrec.data.impression_stream import ABOUT_FILE, PART_FILES
from tritonrec.data.impressions import ImpressionBatch
from tritonrec.data.interactions import Interactions, ItemGenres, UserFeatures
from tritonrec.data.labels import check_counts
from tritonrec.data.loader import LEAVE_ONE_OUT
from tritonrec.data.parquet import write_features
from tritonrec.data.splits import Part, Split

CHUNK = 4096
"""Windows that are cut at a time."""


class _Cut(ImpressionLoader):
    """The windows of a part of a log, which may have none to train on, and labels that are all alike."""

    def _check_windows(self, windows: Tensor) -> None:
        pass

    def _check_tasks(self, labels: np.ndarray, rating: np.ndarray | None, threshold: float) -> None:
        pass

    def labels(self) -> np.ndarray:
        """(N, T) int64, of all events."""
        return self._labels.numpy()

    def held_out(self) -> Iterator[tuple[Part, ImpressionBatch]]:
        """The windows for validation and test, with their part."""
        for part, bounds in self._parts.items():
            if bool((bounds[0] < bounds[1]).any()):
                yield from ((part, batch) for batch in self.evaluation_batches(CHUNK, part))


def write_windows(
    log: Iterable[Interactions],
    out: Path,
    max_history: int,
    max_exposed: int,
    rows_per_group: int,
    report: Callable[[int], None] = lambda rows: None,
    buckets: int = 1,
    users: UserFeatures | None = None,
    genres: ItemGenres | None = None,
    split: Split = LEAVE_ONE_OUT,
) -> None:
    """Write the windows of a log's parts into the empty folder `out`.

    Args:
        max_history, max_exposed, split: as `ImpressionLoader`. rows_per_group: of a row group.
        report: called with the numbers of interactions that are dealt to buckets.
        buckets: users are divided into so many, and one is in memory at a time.

    Raises the errors of `ImpressionLoader`, and ValueError for a split by shares of all events.
    """
    split.check_streamed()  # a bucket has times of its own
    held_out: dict[Part, pq.ParquetWriter] = {}
    written, about = 0, dict[str, Any]()
    events, positive = 0, np.zeros(1, dtype=np.int64)
    for bucket, own in by_user(log, out, buckets, report):
        cut = _Cut(replace(own, user_features=users), 1, max_history, max_exposed, seed=0, split=split)
        labels = cut.labels()
        events, positive = events + len(labels), positive + labels.sum(0)
        about = {"context": list(cut.context), "tasks": list(cut.tasks), "label_rule": cut.label_rule}
        chunks = torch.arange(cut.num_samples, device="cpu").split(CHUNK) if cut.num_samples else ()
        tables = (table_of(cut.make_batch(0, samples)) for samples in chunks)
        written += _write(tables, out / f"part-{bucket:05}.parquet", rows_per_group)
        for part, batch in cut.held_out():
            table = table_of(batch)
            if part not in held_out:
                held_out[part] = pq.ParquetWriter(
                    out / PART_FILES[part], table.schema, write_page_checksum=True
                )
            held_out[part].write_table(table, row_group_size=rows_per_group)
    for writer in held_out.values():
        writer.close()
    for task, count in zip(about.get("tasks", ()), positive, strict=bool(about)):
        check_counts(task, events, int(count))
    if not written:
        raise ValueError(
            f"none of the users has more than max_exposed = {max_exposed} events, and that many are held out "
            "for evaluation"
        )
    (out / ABOUT_FILE).write_text(json.dumps(about))
    empty = np.empty(0, dtype=np.int64)
    write_features(Interactions(empty, empty, empty, genres=genres), out)


def _write(tables: Iterable[pa.Table], path: Path, rows_per_group: int) -> int:
    """The number of rows; no file for none."""
    writer, rows = None, 0
    for table in tables:
        writer = writer or pq.ParquetWriter(path, table.schema, **PAGES)
        writer.write_table(table, row_group_size=rows_per_group)
        rows += len(table)
    if writer is not None:
        writer.close()
    return rows


def table_of(batch: ImpressionBatch) -> pa.Table:
    """A row for each sample of a batch."""
    past, shown = batch.history_offsets, batch.exposed_offsets
    split = len(batch.history_actions)
    lists = {
        "item": (past, batch.history_items),
        "action": (past, batch.history_actions),
        "timestamp": (past, batch.timestamps[:split]),
        "shown": (shown, batch.exposed_items),
        "shown_timestamp": (shown, batch.timestamps[split:]),
        "label": (shown * len(batch.tasks), batch.labels.flatten()),
    }
    columns: dict[str, Any] = {f"context_{name}": batch.features[name].ids.numpy() for name in batch.context}
    for name, (offsets, values) in lists.items():
        bounds = pa.array(offsets.numpy(), pa.int64())
        columns[name] = pa.LargeListArray.from_arrays(bounds, pa.array(values.numpy()))
    return pa.table(columns)
