"""What `tritonrec plan` foretells beside what the run takes: peak memory of a rank, and the time of a step.

python ci/benchmarks/measure_plan.py --json FILE
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from frame import options_of, record
from rich.console import Console

from tritonrec.distributed import RankPool
from tritonrec.embedding import Eviction, Placement, PrecisionTiers, TablePolicy
from tritonrec.harness.cli.job import ready
from tritonrec.harness.job import Job
from tritonrec.harness.plan.report import alone, plan_run
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import WindowConfig

WIDE = Job(
    "zipf:users=3000,items=300000,exponent=0.4,seed=3", batch_size=64, max_seq_len=20, num_negatives=20,
    sizes=HSTUConfig(dim=128, max_seq_len=20),
)  # fmt: skip
NARROW = Job("zipf:users=2000,items=20000,seed=3", batch_size=64, sizes=HSTUConfig(dim=32, max_seq_len=50))

CLICKS = Job("criteo:samples=40000", "dlrm", batch_size=256, sizes=HSTUConfig(dim=16))
FOLDER = tempfile.mkdtemp(prefix="measure-plan-")
TIERS, SIZE, LEAST = (
    TablePolicy(precision=PrecisionTiers(2, every=10)),
    TablePolicy(precision=PrecisionTiers("24MiB", every=10)),
    TablePolicy(Eviction("lru", capacity=20_000)),
)


def placed(**where: Any) -> Run:
    """Wide rows somewhere."""
    return Run(replace(WIDE, placement=Placement(**where)), optimizer="sgd", steps=120)


CASES: list[tuple[str, tuple[int, ...], Run]] = [
    ("wide rows, sgd", (1, 2), Run(WIDE, optimizer="sgd", steps=200)),
    ("narrow rows", (1, 2, 4), Run(NARROW, steps=300)),
    ("narrow rows, larger batches", (1, 2), Run(replace(NARROW, batch_size=256), steps=80)),
    ("clicks", (1, 2, 4), Run(CLICKS, steps=150)),
    ("wide rows, on disk", (1, 2), placed(storage="disk", path=FOLDER, memory="64MiB")),
    ("wide rows, on the device", (1, 2), placed(storage="device")),
    ("wide rows, cached", (1, 2), placed(storage="cached", cache_rows=20_000)),
    ("wide rows, in 16 bits", (1,), Run(replace(WIDE, policy=TIERS), optimizer="sgd", steps=120)),
    ("wide rows, in 16 bits beyond 24 MiB", (1, 2),
     Run(replace(WIDE, policy=SIZE), optimizer="sgd", steps=120)),
    ("wide rows, evicted", (1,), Run(replace(WIDE, policy=LEAST), optimizer="sgd", steps=120)),
    ("wide rows, saved", (1, 2), Run(WIDE, optimizer="adam", steps=120, checkpoint=Path("saves"))),
]  # fmt: skip


def measured(name: str, world_size: int, run: Run) -> dict[str, Any]:
    """One case, foretold and run in processes of its own."""
    run = ready(replace(run, window=WindowConfig(4)))
    with TemporaryDirectory() as folder:
        run = replace(
            run, plan=Path(folder, "plan.json"), checkpoint=run.checkpoint and Path(folder, "saves")
        )
        plan_run(run, world_size, json_file=run.plan, console=Console(quiet=True))
        if world_size == 1:
            summary = alone(train, run, True)
        else:
            with RankPool([world_size], timedelta(seconds=300)) as pool:
                summary, *_ = pool.run(train, world_size, run, True)
    return {"case": name, "ranks": world_size, "steps": run.steps, **summary["beside_plan"]}


def line(row: dict[str, Any]) -> str:
    """Of the page's table."""
    foretold, peak = (row[name] / 2**20 for name in ("peak_planned", "peak"))
    step = row["seconds_per_step_planned"] / row["seconds_per_step"]
    return (
        f"| {row['case']} | {row['ranks']} | {row['rows_planned']:,} | {row['rows']:,} | {foretold:.0f} | "
        f"{peak:.0f} | {foretold / peak:.2f} | {step:.2f} |"
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
