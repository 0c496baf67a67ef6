"""What `tritonrec plan` foretells beside what the run takes: peak memory of a rank, and the time of a step.

python ci/benchmarks/measure_plan.py --json FILE
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from tritonrec.distributed import Communicators, RankPool
from tritonrec.embedding import Eviction, Placement, PrecisionTiers, TablePolicy
from tritonrec.harness.cli.job import ready
from tritonrec.harness.job import Job
from tritonrec.harness.plan.report import plan_run
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import WindowConfig

WIDE = Job(
    "zipf:users=3000,items=300000,exponent=0.4,seed=3", batch_size=64, max_seq_len=20, num_negatives=20,
    sizes=HSTUConfig(dim=128, max_seq_len=20),
)  # fmt: skip
NARROW = Job("zipf:users=2000,items=20000,seed=3", batch_size=64, sizes=HSTUConfig(dim=32, max_seq_len=50))
CLICKS = Job("criteo:samples=60000", model="dlrm", batch_size=512, sizes=HSTUConfig(dim=32))
LRU, TIERS = TablePolicy(Eviction("lru", 40_000)), TablePolicy(precision=PrecisionTiers(4, 50))
CACHED, DEVICE = Placement("cached", cache_rows=1 << 16), Placement("device")

CASES: list[tuple[str, tuple[int, ...], Run]] = [
    ("wide rows", (1, 2, 4), Run(WIDE, steps=200)),
    ("wide rows, sgd", (1,), Run(WIDE, optimizer="sgd", steps=200)),
    ("wide rows, sequential", (1,), Run(WIDE, mode="sequential", steps=200)),
    ("wide rows, lru", (1, 2), Run(replace(WIDE, policy=LRU), steps=200)),
    ("wide rows, tiers", (1,), Run(replace(WIDE, policy=TIERS), steps=200)),
    ("wide rows, cached", (1, 2), Run(replace(WIDE, placement=CACHED), steps=200)),
    ("wide rows, device", (1, 2), Run(replace(WIDE, placement=DEVICE), steps=200)),
    ("wide rows, saved", (1, 2), Run(WIDE, steps=200, checkpoint=Path("checkpoint"))),
    ("narrow rows", (1, 2, 4), Run(NARROW, steps=300)),
    ("clicks", (1, 2, 4), Run(CLICKS, steps=100)),
]


def whole(communicators: Communicators, run: Run) -> dict[str, Any]:
    """The run, and the highest resident memory of this process."""
    summary = train(communicators, run, quiet=True)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {**summary, "peak": int(status["VmHWM"].split()[0]) << 10}


def measured(name: str, world_size: int, run: Run) -> dict[str, Any]:
    """One case, foretold and run in processes of its own."""
    run = ready(replace(run, window=WindowConfig(4)))
    planned = plan_run(run, world_size, console=Console(quiet=True))
    with TemporaryDirectory() as folder, RankPool([world_size], timedelta(seconds=120)) as pool:
        if run.checkpoint:
            run = replace(run, checkpoint=Path(folder) / "checkpoint")
        found = pool.run(whole, world_size, run)
    return {
        "case": name, "ranks": world_size, "steps": run.steps,
        "peak_foretold": max(each.peak for each in planned.ranks),
        "peak": max(each["peak"] for each in found),
        "rows_foretold": planned.rows, "rows": found[0]["tables"]["rows"],
        "step_foretold": planned.step_seconds, "step": found[0]["seconds_per_step"],
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """Of the page's table."""
    foretold, peak = (row[name] / 2**20 for name in ("peak_foretold", "peak"))
    return (
        f"| {row['case']} | {row['ranks']} | {row['rows_foretold']:,} | {row['rows']:,} | {foretold:.0f} | "
        f"{peak:.0f} | {foretold / peak:.3f} | {row['step_foretold'] / row['step']:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    chosen = parser.parse_args()
    rows = []
    for name, ranks, run in CASES:
        for world_size in ranks if chosen.only in name else ():
            rows.append(measured(name, world_size, run))
            print(line(rows[-1]), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
