"""Memory of a table's row, beside that of FBGEMM's.

    python ci/benchmarks/measure_memory.py --rows 500000 --json ci/baselines/memory.json

A process of its own inserts keys in batches of 65,536, reads its resident memory before and after, and the
peak in between; bytes per row, beside those of weights and optimizer state alone. FBGEMM's CPU table, which
TorchRec uses, has a fixed number of rows and no keys; it is skipped where it is not installed (`bash
ci/benchmarks/torchrec.sh`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from fbgemm import fbgemm_table
from frame import options_of, record
from resident import give_back, peak_from_here, resident

from tritonrec.embedding.table import DynamicTable

DIM, BATCH = 64, 1 << 16
Fill = Callable[[int], tuple[object, dict[str, float]]]


def fill_ours(state: int, rows: int) -> tuple[object, dict[str, float]]:
    """A table whose rows have so many float32 values of optimizer state, and bytes of its parts per row."""
    table = DynamicTable(DIM, DIM + state)
    for start in range(0, rows, BATCH):
        keys = torch.arange(start, min(start + BATCH, rows)) * 0x9E3779B97F4A7C1
        table.lookup(keys, start // BATCH)
    return table, {f"{name} bytes": size / rows for name, size in table.memory().items() if size}


def fill_fbgemm(rows: int) -> tuple[object, dict[str, float]]:
    table = fbgemm_table("NONE", torch.randn(1, DIM).expand(rows, DIM))
    table(torch.arange(BATCH), torch.arange(BATCH + 1)).backward(torch.ones(BATCH, DIM))
    return table, {}


TABLES: dict[str, Fill] = {
    "sgd": partial(fill_ours, 0), "row-wise Adagrad": partial(fill_ours, 1),
    "Adam": partial(fill_ours, 2 * DIM), "FBGEMM, row-wise Adagrad": fill_fbgemm,
}  # fmt: skip


def bytes_of_a_row(fill: Fill, rows: int) -> dict[str, float]:
    """Of a table with that many rows, in this process."""
    warm = fill(BATCH)
    del warm
    give_back()
    before = resident()
    peak_from_here()
    table, parts = fill(rows)
    peak = resident("VmHWM") - before
    give_back()
    taken = resident() - before
    del table
    return {"resident": taken / rows, "peak": peak / rows, **parts}


def main() -> None:
    one = {"choices": TABLES, "help": "measure one table here"}
    options = options_of(__doc__, rows=1_000_000, one=one)
    if options.one:
        torch.set_num_threads(1)
        print(json.dumps(bytes_of_a_row(TABLES[options.one], options.rows)))
        return
    rows = {}
    for name in TABLES:
        command = [sys.executable, __file__, "--one", name, "--rows", str(options.rows)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{name} skipped: {done.stderr.strip().splitlines()[-1]}")
            continue
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {', '.join(f'{key} {value:,.1f}' for key, value in rows[name].items())}", flush=True)
    record(options, rows=rows)


if __name__ == "__main__":
    main()
