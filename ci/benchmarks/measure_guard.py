"""What the guard of consistency "batch" costs: its first check and its share of a thousand steps where a
model passes, and the time until the refusal where its samples see each other.

    python ci/benchmarks/measure_guard.py --steps 40 --json FILE

CPU time of the thread that computes, one thread, one process, N = 1, mode "sequential". A thousand steps are
extrapolated: the checks that sizes of `--steps` batches need, an early one and a drawn one, and what each
step pays for looking whether one is due. Models of the tests are there in their 64 columns.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from frame import options_of, record

from tritonrec import nn
from tritonrec.distributed import Communicators
from tritonrec.harness.job import Job
from tritonrec.harness.verify.own_code import ConvertedJob
from tritonrec.pipeline import NotBatchInvariantError, Trainer, WindowConfig
from tritonrec.pipeline.guard import EARLY, EVERY, FEW_SAMPLES, Guard

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "pipeline")]
import trainer_parts  # noqa: E402

trainer_parts.DIM = 64  # read by the models of the tests as these are imported
from test_guard import HARMLESS, MIXING  # noqa: E402

SEQUENCES, CLICKS = nn.HSTUConfig(dim=64, heads=2, layers=2), nn.HSTUConfig(dim=32)


class OwnJob(Job):
    """The job with a model of the tests."""

    build_model: object

    def _model(self):
        return type(self).build_model()


def own(build):
    return type("Own", (OwnJob,), {"build_model": staticmethod(build)})("ml-100k", sizes=SEQUENCES)


JOBS = {
    "HSTU": Job("ml-100k", sizes=SEQUENCES),
    "SASRec, converted": ConvertedJob("ml-100k", sizes=SEQUENCES),
    "DLRM": Job("criteo:samples=20000", "dlrm", sizes=CLICKS),
    "FuXi": Job("ml-100k", "fuxi", sizes=SEQUENCES),
    "GRM": Job("ml-100k", "grm", sizes=SEQUENCES),
    **{f"small: {name}": own(HARMLESS[name]) for name in ("layer norm", "dropout", "a table's model")},
}
REFUSED = (
    "in-batch softmax", "two towers", "mean", "max", "size", "order", "roll", "batch norm",
    "batch norm without affine", "running buffer", "dropout", "counter",
)  # fmt: skip
RUN = 1000


class Timed(Guard):
    """Notes the seconds of each comparison with the samples that it takes."""

    def _compare(self, *given):
        begin = time.thread_time()
        super()._compare(*given)
        checks.append((given[-1], time.thread_time() - begin))


checks: list[tuple[int, float]] = []


def steps_of(job, steps, config, trusted=False):
    """CPU seconds of each step, and what `Guard` did."""
    model, tables, optimizer = job.build("adam")
    loader, times = job.loader(), []
    batches = [loader.batch(step) for step in range(steps)]
    local = Communicators.local()
    with Trainer(model, tables, optimizer, local, "sequential", config, trust_model=trusted) as trainer:
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
    steps_of(job, 12, WindowConfig(1))  # compiles
    checks.clear()
    times, _ = steps_of(job, steps, WindowConfig(1), trusted=True)
    _, looked = steps_of(job, max(steps, EARLY + 1), WindowConfig(1))
    step = median(times[3:])
    whole = [seconds for most, seconds in checks if most != FEW_SAMPLES]
    few = [seconds for most, seconds in checks if most == FEW_SAMPLES]
    total = sum(whole) + (1 + RUN / EVERY) * median(few) + RUN * looked
    return {
        "step_ms": 1e3 * step, "first_ms": 1e3 * whole[0], "sizes": len(whole), "drawn_ms": 1e3 * median(few),
        "look_us": 1e6 * looked, "share": total / (RUN * step),
    }  # fmt: skip


def refused(job, steps):
    """One row of the table of models whose samples see each other, whose steps are those at "window"."""
    times, _ = steps_of(job, steps, WindowConfig(1, consistency="window"))
    batch, until = job.loader().batch(0), []
    for _ in range(4):  # the first compiles
        parts = job.build("adam")
        with Trainer(*parts, Communicators.local(), "sequential", WindowConfig(1)) as trainer:
            begin = time.thread_time()
            try:
                next(trainer.run([batch]))
            except NotBatchInvariantError as error:
                until.append(time.thread_time() - begin)
                module = error.module
            else:
                raise AssertionError("a model whose samples see each other was not refused")
    step, refusal = median(times[3:]), median(until[1:])
    return {
        "step_ms": 1e3 * step, "refusal_ms": 1e3 * refusal, "steps": refusal / step, "module": module,
    }  # fmt: skip


def main():
    options = options_of(__doc__, steps=40, batches=(64, 512), only="")
    torch.set_num_threads(1)
    passed, stopped = [], []
    for name, job in JOBS.items():
        for batch in options.batches if options.only in name else ():
            row = measured(replace(job, batch_size=batch), options.steps)
            passed.append({"model": name, "batch": batch, **row})
            print(
                f"| {name} | {batch} | {row['step_ms']:.1f} | {row['first_ms']:.0f} | {row['share']:.2%} |",
                flush=True,
            )
    for name in REFUSED:
        for batch in options.batches if options.only in name else ():
            row = refused(replace(own(MIXING[name][0]), batch_size=batch), options.steps)
            stopped.append({"model": name, "batch": batch, **row})
            print(
                f"| {name} | {batch} | {row['step_ms']:.1f} | {row['refusal_ms']:.0f} | {row['steps']:.1f} |",
                flush=True,
            )
    record(options, rows=passed, refused=stopped)


if __name__ == "__main__":
    main()
