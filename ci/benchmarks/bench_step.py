"""A training step on MovieLens-100K: what "batch" consistency costs over "window".

The two levels take turns step by step in one process, so that a change of the machine's speed meets both.
Their losses are compared before anything is timed: equal to rounding, since only the sums' order differs.

    pytest ci/benchmarks/bench_step.py -s
"""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch

from tritonrec.distributed import Communicators
from tritonrec.harness.job import Job
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig

STEPS = 24
MODEL = HSTUConfig(dim=64, layers=2, heads=2, qk_dim=32, v_dim=32, max_seq_len=50, dropout=0.2)


def trainer(job, consistency, micro_batches):
    parts = job.build("adam")
    config = WindowConfig(micro_batches, consistency, seed=job.seed)
    return Trainer(*parts, Communicators.local(), "sequential", config)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_batch_consistency_over_window(benchmark, micro_batches):
    torch.set_num_threads(1)
    job = Job("ml-100k", batch_size=128, max_seq_len=50, num_negatives=32, sizes=MODEL)
    loader = job.loader()
    batches = [loader.batch(step) for step in range(STEPS)]
    times: dict[str, list[float]] = {"window": [], "batch": []}
    losses: dict[str, list[float]] = {"window": [], "batch": []}
    with trainer(job, "window", micro_batches) as window, trainer(job, "batch", micro_batches) as batch:

        def in_turn():
            for step in batches:
                for name, training in (("window", window), ("batch", batch)):
                    began = time.perf_counter()
                    result = training.step(step)
                    times[name].append(time.perf_counter() - began)
                    losses[name].append(float(result.losses.double().sum()) / result.loss_terms)

        benchmark.pedantic(in_turn, rounds=1)
    torch.testing.assert_close(losses["batch"], losses["window"], rtol=1e-4, atol=0)
    warm = 4
    ratios = sorted(b / w for b, w in zip(times["batch"][warm:], times["window"][warm:], strict=True))
    benchmark.extra_info.update(
        workload=f"ml-100k, 128 samples, dim 64, 2 layers, 32 negatives, N={micro_batches}",
        window_ms=round(median(times["window"][warm:]) * 1e3, 2),
        batch_ms=round(median(times["batch"][warm:]) * 1e3, 2),
        batch_over_window=round(median(ratios), 3),
        spread=[round(ratios[len(ratios) // 10], 3), round(ratios[-1 - len(ratios) // 10], 3)],
    )
    print(benchmark.extra_info)
