"""Memory of a table's row and of a training step, and the page faults of a step.

    python ci/benchmarks/measure_memory.py --json ci/baselines/memory.json

A table: a process of its own inserts keys in batches of 65,536, reads its resident memory before and after,
and the peak in between; bytes per row, beside those of weights and optimizer state alone. FBGEMM's CPU table,
which TorchRec uses, has a fixed number of rows and no keys; it is skipped where it is not installed
(`bash ci/benchmarks/torchrec.sh`).

A step: MovieLens-100K, one rank and one thread, a process of its own for each mode and allocator setting.
Faults are minor page faults of the whole process in each step after the first ten, the median; a fault maps 4
KiB and the kernel zeroes it. Peak is the most resident memory of those steps less that before the first.
"Kept" is `tritonrec.host_memory.keep_freed_memory`, as commands and ranks call it; "default" is glibc as it
comes. Neither depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_dynamic_table import give_back, resident
from fbgemm import fbgemm_table

from tritonrec.distributed import Communicators
from tritonrec.embedding.table import DynamicTable
from tritonrec.harness.environment import processor
from tritonrec.harness.job import Job
from tritonrec.host_memory import keep_freed_memory
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig

DIM, BATCH = 64, 1 << 16
STATE = {"sgd": 0, "row-wise Adagrad": 1, "Adam": 2 * DIM}
"""float32 values of optimizer state in a row."""
MODEL = HSTUConfig(dim=DIM, layers=2, heads=2, qk_dim=32, v_dim=32, max_seq_len=50, dropout=0.2)
WARM = 10
MODES = {
    "sequential, N = 1": ("sequential", 1), "sequential, N = 8": ("sequential", 8),
    "nestpipe, N = 8": ("nestpipe", 8),
}  # fmt: skip


def peak_from_here() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def fill_ours(width: int, rows: int) -> tuple[object, dict[str, float]]:
    table = DynamicTable(DIM, DIM + width)
    for start in range(0, rows, BATCH):
        keys = torch.arange(start, min(start + BATCH, rows)) * 0x9E3779B97F4A7C1
        table.lookup(keys, start // BATCH)
    return table, {f"{name} bytes": size / rows for name, size in table.memory().items() if size}


def fill_fbgemm(rows: int) -> tuple[object, dict[str, float]]:
    table = fbgemm_table("NONE", torch.randn(1, DIM).expand(rows, DIM))
    table(torch.arange(BATCH), torch.arange(BATCH + 1)).backward(torch.ones(BATCH, DIM))
    return table, {}


def table_row(fill: Callable[[int], tuple[object, dict[str, float]]], rows: int) -> dict[str, float]:
    """Bytes per row of a table with that many rows."""
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


def step_memory(name: str, kept: bool, steps: int, batch_size: int) -> dict[str, float]:
    """Page faults of a step, and megabytes, of one rank in this process."""
    if kept:
        keep_freed_memory()
    mode, micro_batches = MODES[name]
    job = Job("ml-100k", batch_size=batch_size, max_seq_len=50, num_negatives=32, sizes=MODEL)
    loader = job.loader(0, 1)
    batches = [loader.batch(step) for step in range(steps)]
    window = WindowConfig(micro_batches, "batch")
    counts = []
    with Trainer(*job.build("adam"), Communicators.local(), mode, window) as trainer:
        give_back()
        before = resident()
        peak_from_here()
        for _ in trainer.run(batches):
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        peak = resident("VmHWM") - before
    faults = [after - now for now, after in pairwise(counts)][WARM:]
    tokens = median(len(batch.labels) for batch in batches)
    looked_up = tokens * (2 + job.num_negatives) * DIM * 4
    return {
        "faults": median(faults), "most faults": max(faults), "peak MB": peak / 1e6,
        "rows of a batch and their gradients MB": 2 * looked_up / 1e6,
    }  # fmt: skip


def here(name: str, options: argparse.Namespace) -> dict[str, float]:
    """What one process measures, by the name that `measure` gives it."""
    torch.set_num_threads(1)
    kind, _, which = name.partition(": ")
    if kind == "table":
        if which == "FBGEMM, row-wise Adagrad":
            return table_row(fill_fbgemm, options.rows)
        return table_row(lambda rows: fill_ours(STATE[which], rows), options.rows)
    which, _, memory = which.rpartition(", ")
    return step_memory(which, memory == "kept", options.steps, options.batch_size)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    names = [f"table: {state}" for state in STATE] + ["table: FBGEMM, row-wise Adagrad"]
    names += [f"step: {mode}, {memory}" for mode in MODES for memory in ("default", "kept")]
    rows: dict[str, Any] = {}
    for name in names:
        command = [sys.executable, __file__, "--one", name, "--rows", str(options.rows)]
        command += ["--steps", str(options.steps), "--batch-size", str(options.batch_size)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 3:
            rows[name] = {"skipped": done.stderr.strip().splitlines()[-1]}
        elif done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr}")
        else:
            rows[name] = json.loads(done.stdout.splitlines()[-1])
        values = (f"{key} {value:,.1f}" if isinstance(value, float | int) else f"{key}: {value}"
                  for key, value in rows[name].items())  # fmt: skip
        print(f"{name}: {', '.join(values)}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--one", help="measure one row here")
    options = parser.parse_args()
    if options.one:
        try:
            print(json.dumps(here(options.one, options)))
        except ImportError as error:
            print(error, file=sys.stderr)
            sys.exit(3)
        return
    rows = measure(options)
    if options.json:
        environment = {
            "processor": processor(), "cores": os.cpu_count(), "python": platform.python_version(),
            "versions": {each: importlib.metadata.version(each) for each in ("tritonrec", "torch", "numba")},
            "rows": options.rows, "steps": options.steps, "batch_size": options.batch_size,
        }  # fmt: skip
        options.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
