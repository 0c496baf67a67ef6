"""What the guard of consistency "batch" costs: its first check, and its share of a thousand steps.

    python ci/benchmarks/measure_guard.py --steps 40 --json FILE

CPU time of the thread that computes, one thread, one process, N = 1, mode "sequential". A thousand steps are
extrapolated: the checks that sizes of `--steps` batches need, an early one and a drawn one, and what each
step pays for looking whether one is due.
"""

import time
from dataclasses import replace
from statistics import median

import torch
from frame import options_of, record

from tritonrec import nn
from tritonrec.distributed import Communicators
from tritonrec.harness.job import Job
from tritonrec.harness.verify.own_code import ConvertedJob
from tritonrec.pipeline import Trainer, WindowConfig
from tritonrec.pipeline.guard import EARLY, EVERY, FEW_SAMPLES, Guard

SEQUENCES, CLICKS = nn.HSTUConfig(dim=64, heads=2, layers=2), nn.HSTUConfig(dim=32)
JOBS = {
    "HSTU": Job("ml-100k", sizes=SEQUENCES),
    "SASRec, converted": ConvertedJob("ml-100k", sizes=SEQUENCES),
    "DLRM": Job("criteo:samples=20000", "dlrm", sizes=CLICKS),
}
RUN = 1000


class Timed(Guard):
    """Notes the seconds of each comparison with the samples that it takes."""

    def _compare(self, *given):
        begin = time.thread_time()
        super()._compare(*given)
        checks.append((given[-1], time.thread_time() - begin))


checks: list[tuple[int, float]] = []


def steps_of(job, steps, trusted):
    """CPU seconds of each step, and what `Guard` did."""
    model, tables, optimizer = job.build("adam")
    loader, times = job.loader(), []
    batches = [loader.batch(step) for step in range(steps)]
    local = Communicators.local()
    with Trainer(
        model, tables, optimizer, local, "sequential", WindowConfig(1), trust_model=trusted
    ) as trainer:
        trainer.guard.__class__ = Timed
        begin = time.thread_time()
        for _ in trainer.run(batches):
            now = time.thread_time()
            times.append(now - begin)
            begin = now
        looked = time.thread_time()
        for _ in range(200):
            trainer.guard.begin()
        looked = (time.thread_time() - looked) / 200
    return times, looked


def measured(job, steps):
    """One row of the table."""
    steps_of(job, 12, False)  # compiles
    checks.clear()
    times, _ = steps_of(job, steps, True)
    _, looked = steps_of(job, max(steps, EARLY + 1), False)
    step = median(times[3:])
    whole = [seconds for most, seconds in checks if most != FEW_SAMPLES]
    few = [seconds for most, seconds in checks if most == FEW_SAMPLES]
    total = sum(whole) + (1 + RUN / EVERY) * median(few) + RUN * looked
    return {
        "step_ms": 1e3 * step, "first_ms": 1e3 * whole[0], "sizes": len(whole), "drawn_ms": 1e3 * median(few),
        "look_us": 1e6 * looked, "share": total / (RUN * step),
    }  # fmt: skip


def main():
    options = options_of(__doc__, steps=40)
    torch.set_num_threads(1)
    found = []
    for name, job in JOBS.items():
        for batch in (64, 512):
            row = measured(replace(job, batch_size=batch), options.steps)
            found.append({"model": name, "batch": batch, **row})
            print(
                f"| {name} | {batch} | {row['step_ms']:.1f} | {row['first_ms']:.0f} | {row['share']:.2%} |",
                flush=True,
            )
    record(options, rows=found)


if __name__ == "__main__":
    main()
