"""What `tritonrec plan` foretells beside what the run takes: peak memory of a rank, and the time of a step.

python ci/benchmarks/measure_plan.py --json FILE
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from frame import options_of, record
from rich.console import Console

from tritonrec.distributed import Communicators, RankPool
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

CASES: list[tuple[str, tuple[int, ...], Run]] = [
    ("wide rows, sgd", (1,), Run(WIDE, optimizer="sgd", steps=200)),
    ("narrow rows", (1, 2, 4), Run(NARROW, steps=300)),
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
    with RankPool([world_size], timedelta(seconds=120)) as pool:
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
    chosen = options_of(__doc__, only={"default": "", "help": "cases whose name contains this"})
    rows = []
    for name, ranks, run in CASES:
        for world_size in ranks if chosen.only in name else ():
            rows.append(measured(name, world_size, run))
            print(line(rows[-1]), flush=True)
    record(chosen, rows=rows)


if __name__ == "__main__":
    main()
