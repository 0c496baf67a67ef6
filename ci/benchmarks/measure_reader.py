"""Seconds to read logs, whole and streamed, beside pyarrow, pandas and Polars on the same files in one run.

    python ci/benchmarks/measure_reader.py --rows 1000000

Figures are of the fastest of some interleaved runs; the processor's time counts, as readers use several
threads.
"""

# ruff: noqa: E501 - the peers' calls
from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import torch
from frame import by_turns, options_of

from tritonrec.data import ClickStream, load
from tritonrec.data.presets import CRITEO, CRITEO_CATEGORIES, CRITEO_COUNTS

BUFFER, BATCH = 1 << 18, 4096
COLUMNS = ["label", *CRITEO_COUNTS, *CRITEO_CATEGORIES]


def shuffled(path: Path, columns: list[str]) -> int:
    """pyarrow with a shuffle buffer: batches of arrays, a column each."""
    rows, waiting, random = 0, [], np.random.default_rng(0)

    def emit() -> int:
        table = pa.Table.from_batches(waiting)
        table = table.take(random.permutation(len(table)))
        for first in range(0, len(table), BATCH):
            part = table.slice(first, BATCH)
            _ = [part.column(name).combine_chunks() for name in columns]
        return len(table)

    for file in sorted(path.glob("[!_]*.parquet")):
        for batch in pq.ParquetFile(file).iter_batches(1 << 16, columns=columns):
            waiting.append(batch)
            if sum(map(len, waiting)) >= BUFFER:
                rows += emit()
                waiting = []
    return rows + (emit() if waiting else 0)


def plain(path: Path, columns: list[str]) -> int:
    """pyarrow alone, without a shuffle."""
    files = sorted(path.glob("[!_]*.parquet"))
    return sum(len(b) for file in files for b in pq.ParquetFile(file).iter_batches(1 << 16, columns=columns))


def epoch(stream: ClickStream) -> int:
    return sum(stream.batch(step).num_samples for step in range(stream.steps_per_epoch))


def clicks(folder: Path, rows: int, row_group_size: int | None = 8192) -> None:
    random = np.random.default_rng(0)
    made = {"label": random.integers(0, 2, rows).astype(np.int8)}
    made |= {name: random.integers(0, 3000, rows) for name in CRITEO_COUNTS}
    made |= {name: random.zipf(1.2, rows) % 2**32 for name in CRITEO_CATEGORIES}
    folder.mkdir()
    table = pa.table(made)
    for number in range(4):
        pq.write_table(
            table.slice(number * rows // 4, rows // 4),
            folder / f"{number}.parquet",
            row_group_size=row_group_size,
        )


def report(title: str, uses: dict[str, Callable[[], int]]) -> None:
    found = by_turns(uses, 3, warm=0)
    ours, *_ = found.values()
    print(f"\n{title}")
    for name, times in found.items():
        ratios = min(times.wall) / min(ours.wall), min(times.cpu) / min(ours.cpu)
        print(f"  {name:28} {min(times.wall):8.3f} s, {min(times.cpu):8.3f} of the processor, over ours "
              f"{ratios[0]:5.2f}, {ratios[1]:5.2f}")  # fmt: skip


def main() -> None:
    args = options_of(__doc__, rows=1_000_000, only="")
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    rows = args.rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["TRITONREC_CACHE"] = str(folder / "cache")
        random = np.random.default_rng(1)
        if "clicks" in args.only or not args.only:
            for size in (8192, None):
                path = folder / f"clicks-{size}"
                clicks(path, rows, size)
                report(f"ClickStream, 40 columns of Parquet, row groups of {size or 'the default size'}", {
                    "ClickStream": lambda path=path: epoch(ClickStream(path, BATCH, 3, columns=CRITEO)),
                    "pyarrow, shuffle buffer": lambda path=path: shuffled(path, COLUMNS),
                    "pyarrow alone": lambda path=path: plain(path, COLUMNS),
                })  # fmt: skip
        if "csv" in args.only or not args.only:
            path = folder / "log.csv"
            pandas.DataFrame({
                "user": random.integers(0, rows // 10, rows), "item": random.integers(0, 50_000, rows),
                "timestamp": random.integers(1_500_000_000, 1_600_000_000, rows), "rating": random.integers(1, 6, rows),
            }).to_csv(path, index=False)  # fmt: skip
            report("csv, whole", {
                "load": lambda: len(load(path)),
                "pandas": lambda: len(pandas.read_csv(path)),
                "polars": lambda: len(polars.read_csv(path)),
                "pyarrow": lambda: len(pcsv.read_csv(path)),
            })  # fmt: skip

        if "tsv" in args.only or not args.only:
            text = folder / "day"
            count = rows // 4
            words = np.char.mod("%08x", random.integers(0, 2**32, 9973))
            made = {"label": random.integers(0, 2, count)} | {
                n: random.integers(0, 99, count) for n in CRITEO_COUNTS
            }
            made |= {name: words[random.integers(0, 9973, count)] for name in CRITEO_CATEGORIES}
            options = pcsv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
            pcsv.write_csv(pa.table(made), text, options)
            types = dict.fromkeys(CRITEO_CATEGORIES, pa.string())
            read, parse = pcsv.ReadOptions(column_names=COLUMNS), pcsv.ParseOptions(delimiter="\t")
            report("criteo-tsv, whole", {
                "load": lambda: len(load(f"criteo-tsv:{text}")),
                "pandas": lambda: len(pandas.read_csv(text, sep="\t", names=COLUMNS)),
                "polars": lambda: len(
                    polars.read_csv(text, separator="\t", has_header=False, new_columns=COLUMNS)
                ),
                "pyarrow": lambda: len(pcsv.read_csv(text, read, parse, pcsv.ConvertOptions(column_types=types))),
            })  # fmt: skip


if __name__ == "__main__":
    main()
