"""Peak memory of training beside TorchRec's: the same model, rows, batches, optimizer and ranks.

    bash ci/benchmarks/torchrec.sh                                        # installs TorchRec
    python ci/benchmarks/memory_beside_torchrec.py --json ci/baselines/memory_beside_torchrec.json

The systems are those of `bench_torchrec.py`. Each has ranks of its own, that have imported both libraries.
A rank's peak is its most resident memory from building the model to the last step, less its resident memory
before: parameters, tables, optimizer states, batches, what a step allocates, and pages that its code touches
for the first time. The figure is that of the rank that takes most. Losses of every step are compared first.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from bench_torchrec import MODEL, Run, System, compare, job_of, systems, train
from frame import options_of, record
from resident import give_back, peak_from_here, resident
from torchrec_peer import environment_beside_torchrec, find_torchrec

from tritonrec.distributed import Communicators, RankPool
from tritonrec.harness.job import Job
from tritonrec.harness.lab.settings import parse_switches


def measured(
    communicators: Communicators, job: Job, system: System, items: int, steps: int, optimizer: str
) -> tuple[int, Run]:
    """(bytes at the peak over those before, the run) of this rank."""
    from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: F401
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist  # noqa: F401

    job.loader(communicators.rank, communicators.world_size)
    give_back()
    before = resident()
    peak_from_here()
    run = train(communicators, job, system, items, steps, optimizer)
    return resident("VmHWM") - before, run


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    job, items = job_of(options)
    compared = systems(options.micro_batches, parse_switches(options.switch))
    peaks: dict[str, list[int]] = {system.name: [] for system in compared}
    for _ in range(options.rounds + 1):  # the first round compiles
        runs = {}
        for system in compared:
            with RankPool((options.ranks,)) as pool:
                found = pool.run(
                    measured, options.ranks, job, system, items, options.steps, options.optimizer
                )
            peaks[system.name].append(max(peak for peak, _ in found))
            runs[system.name] = found[0][1]
        compare(runs, compared[0].name)
    least = min(median(peaks[system.name][1:]) for system in compared if system.window is None)
    rows = []
    for name, each in peaks.items():
        rows.append({"system": name, "MB": [round(peak / 1e6, 1) for peak in each[1:]]})
        rows[-1]["over the least of TorchRec's"] = round(median(each[1:]) / least, 3)
        print(f"{name:32}  {median(each[1:]) / 1e6:7.1f} MB  {median(each[1:]) / least:5.2f}", flush=True)
    return rows


def main() -> None:
    options = options_of(__doc__, **MODEL, ranks=2)
    find_torchrec()
    rows = measure(options)
    record(options, environment_beside_torchrec(), rows=rows)


if __name__ == "__main__":
    main()
