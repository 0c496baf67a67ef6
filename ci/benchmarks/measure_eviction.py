"""Processor time of a lookup with eviction at every step, beside one without, by size of the table.

    python ci/benchmarks/measure_eviction.py [--rows 200000 1000000 3000000] [--steps N]

16,384 keys a step, a tenth of them new, the others mostly of recent steps; one thread. The median of the
steps after the table is full, and the longest one. What lru evicts is checked by a sort of the last steps.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch
from frame import options_of

from tritonrec.embedding import DynamicTable, Eviction, TablePolicy

KEYS, NEW = 16_384, 1_638
WARMUP = 5


def measured(rows: int, policy: str, steps: int) -> tuple[list[float], DynamicTable]:
    """Milliseconds of each lookup."""
    evictions = {
        "none": None,
        "lru": Eviction("lru", capacity=rows),
        "lfu": Eviction("lfu", capacity=rows),
        "ttl": Eviction("ttl", ttl=rows // NEW),
    }
    table = DynamicTable(16, 32, policy=TablePolicy(eviction=evictions[policy]))
    generator, last = torch.Generator().manual_seed(0), np.full(rows + (steps + WARMUP) * NEW, -1)
    known, step, times = 0, 0, []
    while known < rows:
        keys = torch.arange(known, min(known + (1 << 16), rows))
        table.lookup(keys, step)
        last[keys] = step
        known, step = known + len(keys), step + 1
    for _ in range(steps + WARMUP):
        share = torch.rand(KEYS - NEW, generator=generator, dtype=torch.float64)
        old = (known - 1 - share**3 * min(known, rows)).to(torch.int64).clamp(min=0).unique()
        keys = torch.cat([old, torch.arange(known, known + NEW)])
        before, size = time.thread_time(), len(table)
        table.lookup(keys, step)
        times.append((time.thread_time() - before) * 1e3)
        if (
            policy == "lru" and size > rows
        ):  # the oldest go, the smaller id first, but none of this step or the last
            here = np.flatnonzero((last >= 0) & (last < step - 1))
            here = np.setdiff1d(here, keys.numpy())
            gone = here[np.lexsort((here, last[here]))][: size - rows]
            assert (table.find(torch.from_numpy(gone)) < 0).all(), "another row should have gone"
            last[gone] = -1
        last[keys] = step
        known, step = known + NEW, step + 1
    return times[WARMUP:], table


def main() -> None:
    options = options_of(__doc__, rows=[200_000, 1_000_000, 3_000_000], steps=40)
    torch.set_num_threads(1)
    for rows in options.rows:
        for policy in ("none", "lru", "ttl", "lfu"):
            times, table = measured(rows, policy, options.steps)
            extra = table.memory()["metadata"] / len(table)
            print(
                f"{rows:>9,} rows, {policy:4}: {median(times):7.2f} ms a lookup, {max(times):7.2f} the "
                f"longest, {extra:4.1f} bytes of metadata a row"
            )


if __name__ == "__main__":
    main()
