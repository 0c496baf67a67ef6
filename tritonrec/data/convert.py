"""Write a log as Parquet: ``python -m tritonrec.data.convert SOURCE OUT``.

``--partition-by date`` makes a folder for each day (UTC) of the events' timestamps. Within a day the rows
keep their order, so users' sequences equal those of the source. ``--sequences`` writes a row for each user,
which `tritonrec.data.NextItemStream` streams. OUT appears when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.progress import Progress

from tritonrec.data import parquet
from tritonrec.data.epochs import check_at_least
from tritonrec.data.interactions import Interactions
from tritonrec.data.log_format import LogFormat, described
from tritonrec.data.sources import load_interactions, source_of
from tritonrec.data.times import check_calendar
from tritonrec.data.vocabulary import save_words
from tritonrec.files import ScratchFolder
from tritonrec.files.places import become, local_path

TIME_UNITS = ("s", "ms", "us", "ns")


def write(
    log: Interactions,
    out: Path | str,
    partition_by: Literal["date"] | None = None,
    time_unit: str = "",
    rows_per_file: int = 1_000_000,
    rows_per_group: int = 65_536,
    report: Callable[[int], None] = lambda rows: None,
) -> None:
    """Write `log` into the folder `out`, in the layout of `tritonrec.data.parquet`.

    Args:
        partition_by: ``"date"`` for a folder a day (UTC), which takes the unit of the timestamps:
            `time_unit`, by default the log's, or seconds.
        rows_per_file, rows_per_group: largest number of rows of a file, and of a row group, which is a shard.
        report: called after each file with its number of rows.

    Raises FileExistsError where `out` is a file or a folder that is not empty, and ValueError for an empty
    log, numbers below 1 and days before 1900 or after 2100.
    """
    check_at_least("rows_per_file", rows_per_file, 1)
    check_at_least("rows_per_group", rows_per_group, 1)
    if partition_by not in (None, "date"):
        raise ValueError(f"partition_by must be 'date' or None, got {partition_by!r}")
    if len(log) == 0:
        raise ValueError("the log holds no interactions")
    table = parquet.table_of(replace(log, time_unit=time_unit or log.time_unit))
    with new_folder(out) as scratch:
        for folder, rows in _partitions(log, partition_by, time_unit):
            (scratch / folder).mkdir(exist_ok=True)
            digits = max(len(str(len(rows) // rows_per_file)), 5)  # names in the order of their numbers
            for number, first in enumerate(range(0, len(rows), rows_per_file)):
                part = rows[first : first + rows_per_file]
                path = scratch / folder / f"part-{number:0{digits}}.parquet"
                pq.write_table(
                    table.take(part), path, row_group_size=rows_per_group, write_page_checksum=True
                )
                report(len(part))
        parquet.write_features(log, scratch)
        save_words(log.words, scratch)


@contextmanager
def new_folder(out: Path | str) -> Iterator[Path]:
    """A folder that becomes `out` when the block ends well.

    Raises FileExistsError where `out` is a file or a folder that is not empty.
    """
    out = local_path(out, "the folder of converted files")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder: choose another one, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(f".{out.name}-", out.parent) as name:  # on the same file system
        scratch = Path(name)
        scratch.chmod(0o755)
        yield scratch
        become(scratch, out)


def _partitions(
    log: Interactions, partition_by: str | None, time_unit: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Folder and rows of each partition."""
    if partition_by is None:
        yield ".", np.arange(len(log))
        return
    unit = time_unit or log.time_unit or "s"
    check_calendar("--partition-by date", int(log.timestamp.min()), int(log.timestamp.max()), unit)
    days = log.timestamp.astype(f"datetime64[{unit}]").astype("datetime64[D]")
    order = np.argsort(days, kind="stable")
    names, starts = np.unique(days[order], return_index=True)
    for name, rows in zip(names, np.split(order, starts[1:]), strict=True):
        yield f"date={name}", rows


def convert(
    source: Annotated[
        str,
        typer.Argument(help="as --data of tritonrec train: ml-100k, a path, csv:PATH?user=uid&item=iid, ..."),
    ],
    out: Annotated[Path, typer.Argument(help="a folder that does not exist yet, or is empty")],
    partition_by: Annotated[str | None, typer.Option(help="'date': a folder for each day")] = None,
    time_unit: Annotated[
        str | None, typer.Option(help="of timestamps: s, ms, us or ns; found by default, or the source's")
    ] = None,
    sequences: Annotated[
        bool, typer.Option("--sequences", help="a row for each user's sequence, to be streamed")
    ] = False,
    rows_per_file: Annotated[int, typer.Option(help="most rows of a file")] = 1_000_000,
    rows_per_group: Annotated[int, typer.Option(help="most rows of a row group")] = 65_536,
) -> None:
    """Write the log SOURCE as Parquet into the folder OUT."""
    unit = time_unit or ""
    try:
        if time_unit is not None and time_unit not in TIME_UNITS:
            raise ValueError(f"--time-unit must be s, ms, us or ns, got {unit!r}")
        if time_unit and source_of(source) is not None:
            source = described(source, LogFormat(time_unit=time_unit))  # type: ignore[arg-type]
        if sequences and partition_by:
            raise ValueError("--sequences has a row for each user, so --partition-by date cannot divide it")
        with Progress(transient=True, console=Console(stderr=True)) as progress:
            task = progress.add_task("writing", total=None)
            report = partial(progress.advance, task)
            if sequences:
                count = _write_sequences(source, out, rows_per_file, rows_per_group, report)
            else:
                log = load_interactions(source)
                count = len(log)
                progress.update(task, total=count)
                sizes = rows_per_file, rows_per_group
                write(log, out, partition_by, unit, *sizes, report)  # type: ignore[arg-type]
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}")
        raise typer.Exit(1) from error
    files = len(list(out.rglob("part-*.parquet")))
    print(f"{out}: {count:,} interactions in {files} file{'s' if files > 1 else ''}")


def _write_sequences(
    source: str, out: Path, rows_per_file: int, rows_per_group: int, report: Callable[[int], None]
) -> int:
    """Write a row for each user; returns the number of interactions. A log in files is read in parts."""
    from tritonrec.data.convert_sequences import buckets_of, write_sequences

    counted: list[int] = []

    def count(rows: int) -> None:
        counted.append(rows)
        report(rows)

    found = source_of(source)
    if found is not None:
        log = found.events()
        parts, buckets, words = log.parts(), buckets_of(log.rows()), log.words
    else:
        parts, buckets, words = iter([load_interactions(source)]), 1, {}
    with new_folder(out) as scratch:
        write_sequences(parts, scratch, rows_per_file, rows_per_group, count, buckets)
        save_words(words, scratch)
    return sum(counted)


if __name__ == "__main__":
    typer.run(convert)
