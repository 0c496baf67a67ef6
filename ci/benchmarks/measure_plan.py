"""What `tritonrec plan` foretells beside what the run takes: peak memory of a rank, and the time of a step.

    python ci/benchmarks/measure_plan.py --json FILE

A plan is made from `--trial-steps`, fewer than its run has, so that rows and peak are foretold and not seen.
The columns "ratio" and "step" are what was planned over what was taken. A
step's time is a median: over all steps of the run but the first, and over those of the trial but four.
Kernels that are not compiled yet make their first row longer.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
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

FOLDER = tempfile.mkdtemp(prefix="measure-plan-")
LOG, STEPS, BATCH = Path(FOLDER, "clicks.csv"), 120, 512
WIDE = Job(
    f"{LOG}?label=click&categories=a,b,c,d", "dlrm", batch_size=BATCH, stream=False, sizes=HSTUConfig(dim=128)
)
HISTORIES = Job(
    "zipf:users=500,items=20000,seed=3", batch_size=32, max_seq_len=20,
    sizes=HSTUConfig(dim=32, max_seq_len=20),
)  # fmt: skip
DISK = {"path": FOLDER, "memory": "32MiB"}


def wide(optimizer: Any = "sgd", policy: TablePolicy | None = None, **more: Any) -> Run:
    """Rows of 128 weights, nearly all of them new in every step, somewhere."""
    placement = Placement(**{name: more.pop(name) for name in list(more) if name != "checkpoint"})
    job = replace(WIDE, placement=placement, policy=policy or TablePolicy())
    return Run(job, optimizer=optimizer, steps=STEPS, **more)


CASES: list[tuple[str, tuple[int, ...], Run]] = [
    ("in memory, sgd", (1, 2, 4), wide()),
    ("in memory, adam", (1,), wide("adam")),
    ("two copies, adam", (2, 4), wide("adam")),
    ("on the device", (1,), wide(storage="device")),
    ("cached", (1, 2), wide(storage="cached", cache_rows=20_000)),
    ("on disk", (1, 2, 4), wide(storage="disk", **DISK)),
    ("cached before a disk", (1,), wide(storage="cached", cache_rows=20_000, **DISK)),
    ("on disk with its keys", (1, 2), wide(storage="disk", index_memory="1MiB", **DISK)),
    ("16 bits by use", (1, 2), wide(policy=TablePolicy(precision=PrecisionTiers(2, every=10)))),
    ("16 bits beyond 8 MiB", (1,), wide(policy=TablePolicy(precision=PrecisionTiers("8MiB", every=10)))),
    ("evicted, lru", (1, 2), wide("adam", TablePolicy(Eviction("lru", capacity=15_000)))),
    ("evicted, lfu", (1,), wide("adam", TablePolicy(Eviction("lfu", capacity=15_000)))),
    ("admitted at the second step", (1, 2), wide("adam", TablePolicy(admission=2))),
    ("saved, adam", (1, 2), wide("adam", checkpoint=Path("saves"))),
    ("histories", (1,), Run(HISTORIES, steps=100)),
]  # fmt: skip


def write_log() -> None:
    """Clicks of four categories with 300,000 ids each, the popular ones twice as often as a mean one."""
    random = np.random.default_rng(0)
    samples = STEPS * BATCH * 10 // 9 + BATCH  # the last tenth is held out
    ids = (300_000 * random.random((samples, 4)) ** 1.5).astype(np.int64)
    columns = np.column_stack([random.random(samples) < 0.25, ids])
    np.savetxt(LOG, columns, fmt="%d", delimiter=",", header="click,a,b,c,d", comments="")


def measured(name: str, world_size: int, run: Run, trial_steps: int) -> dict[str, Any]:
    """One case, foretold and run in processes of its own."""
    run = ready(replace(run, window=WindowConfig(4)))
    replicas = 2 if name.startswith("two copies") else 1
    with TemporaryDirectory() as folder:
        run = replace(
            run, plan=Path(folder, "plan.json"), checkpoint=run.checkpoint and Path(folder, "saves")
        )
        plan_run(
            run, world_size, replicas, trial_steps=trial_steps, json_file=run.plan,
            console=Console(quiet=True),
        )  # fmt: skip
        if world_size == 1:
            summary = alone(train, run, True)
        else:
            with RankPool([(world_size, replicas)], timedelta(seconds=300)) as pool:
                summary, *_ = pool.run(train, world_size, run, True, replicas=replicas)
    return {"case": name, "ranks": world_size, "steps": run.steps, **summary["beside_plan"]}


def ratios(row: dict[str, Any]) -> tuple[float, float]:
    """Planned over taken, of peak and of step."""
    step = row["seconds_per_step_planned"] / row["seconds_per_step"]
    return row["peak_planned"] / row["peak"], step


def line(row: dict[str, Any]) -> str:
    """Of the page's table."""
    foretold, taken = (row[name] / 2**20 for name in ("peak_planned", "peak"))
    peak, step = ratios(row)
    return (
        f"| {row['case']} | {row['ranks']} | {row['rows_planned']:,} | {row['rows']:,} | {foretold:.0f} | "
        f"{taken:.0f} | {peak:.2f} | {step:.2f} |"
    )


def main() -> None:
    chosen = options_of(
        __doc__, only={"default": "", "help": "cases whose name contains this"},
        trial_steps={"default": 40, "help": "steps that a plan tries"},
    )  # fmt: skip
    write_log()
    rows: list[dict[str, Any]] = []
    for name, ranks, run in CASES:
        for world_size in ranks if chosen.only in name else ():
            rows.append(measured(name, world_size, run, chosen.trial_steps))
            print(line(rows[-1]), flush=True)
    peaks, steps = ([each[which] for each in map(ratios, rows)] for which in (0, 1))
    counts = (
        f"{sum(abs(ratio - 1) <= most for ratio in found)} within {most:.0%}"
        for found in (peaks, steps) for most in (0.05, 0.15)
    )  # fmt: skip
    print("{} rows: peaks {}, {}; steps {}, {}".format(len(rows), *counts))
    record(chosen, rows=rows)


if __name__ == "__main__":
    main()
