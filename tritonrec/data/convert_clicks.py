"""Clicks in text formats as Parquet, in memory for a part of them only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tritonrec.data.convert_sequences import PAGES

CLICK_PAGES = {**PAGES, "dictionary_pagesize_limit": 1 << 14}
"""The default limit of a dictionary takes 2 MiB a column while it is written."""


def write_clicks(
    parts: Iterable[pa.Table],
    out: Path,
    rows_per_file: int,
    rows_per_group: int,
    report: Callable[[int], None] = lambda rows: None,
) -> None:
    """Write the rows of tables of one schema into the empty folder `out`, as `ClickStream` takes them.

    Args:
        rows_per_file, rows_per_group: of all files but the last one, and of all row groups but a file's last.
        report: called with numbers of rows that are written.

    Raises the errors of `parts`, and ValueError where they have no rows.
    """
    files = rows = 0
    with ExitStack() as stack:
        for group in _groups(parts, rows_per_group):
            if rows % rows_per_file == 0:
                stack.close()
                file = out / f"part-{files:05}.parquet"
                writer = stack.enter_context(pq.ParquetWriter(file, group.schema, **CLICK_PAGES))
                files += 1
            writer.write_table(group)
            rows += len(group)
            report(len(group))
    if not rows:
        raise ValueError("the log holds no impressions")


def _groups(parts: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows, `rows` at a time, so that a file's blocks do not show."""
    waiting: list[pa.Table] = []
    for part in parts:
        waiting.append(part)
        while sum(map(len, waiting)) >= rows:
            joined = pa.concat_tables(waiting)
            yield joined.slice(0, rows)
            waiting = [joined.slice(rows)]
    if sum(map(len, waiting)):
        yield pa.concat_tables(waiting)
