"""A training step on MovieLens-100K: what "batch" consistency costs over "window".

The two levels take turns step by step in one process, so that a change of the machine's speed meets both.
Every step has another batch, whose losses were computed before by the reference run: after its time is taken,
a step of "batch" must have the same bits, and one of "window" the same mean to rounding, since only the sums'
order differs (`honest`).

    pytest ci/benchmarks/bench_step.py -s
"""

from __future__ import annotations

import math
import time
from statistics import median

import pytest
import torch
from honest import Given, Rounds, by_turns, clocked, copied
from kernel_cases import moved

from tritonrec.distributed import Communicators
from tritonrec.harness.job import Job
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig

STEPS = 24
MODEL = HSTUConfig(dim=64, layers=2, heads=2, qk_dim=32, v_dim=32, max_seq_len=50, dropout=0.2)


def trainer(job, consistency, micro_batches, mode="sequential"):
    parts = job.build("adam")
    config = WindowConfig(micro_batches, consistency, seed=job.seed)
    return Trainer(*parts, Communicators.local(), mode, config)


def expected_losses(job, batches):
    """The loss of each token in each step, by the reference run with exact sums."""
    with trainer(job, "batch", 1, "reference") as training:
        return [training.step(batch).losses.clone() for batch in batches]


def rounds_of(training, consistency, batches, expected) -> Rounds:
    """One step of the trainer in each round."""

    def step(batch):
        return training.step(batch).losses

    def rounds(number):
        def check(got, _batch):
            if consistency == "batch":
                assert torch.equal(got, expected[number]), "other losses than the reference's"
            mean, meant = got.double().mean(), expected[number].double().mean()
            torch.testing.assert_close(mean, meant, rtol=1e-4, atol=0)

        return Given(step, (copied(batches[number]),), check)

    return rounds


@pytest.mark.parametrize("samples, micro_batches", [(128, 1), (128, 4), (64, 1), (64, 8)])
def test_batch_consistency_over_window(benchmark, one_thread, samples, micro_batches):
    job = Job("ml-100k", batch_size=samples, max_seq_len=50, num_negatives=32, sizes=MODEL)
    loader = job.loader()
    batches = [loader.batch(step) for step in range(STEPS)]
    expected = expected_losses(job, batches)
    with trainer(job, "window", micro_batches) as window, trainer(job, "batch", micro_batches) as batch:
        contenders = {
            name: rounds_of(training, name, batches, expected)
            for name, training in (("window", window), ("batch", batch))
        }
        least_bytes = moved(*job.build("adam")[0].parameters(), times=6)  # with Adam's moments, in and out
        times: dict[str, list[float]] = {}

        def in_turn():
            clock = clocked(time.perf_counter)
            times.update(by_turns(contenders, STEPS - 1, least_bytes, clock, until=math.inf))

        benchmark.pedantic(in_turn, rounds=1)
    warm = 3  # and the turn that is not counted
    ratios = sorted(b / w for b, w in zip(times["batch"][warm:], times["window"][warm:], strict=True))
    benchmark.extra_info.update(
        workload=f"ml-100k, {samples} samples, dim 64, 2 layers, 32 negatives, N={micro_batches}",
        window_ms=round(median(times["window"][warm:]) * 1e3, 2),
        batch_ms=round(median(times["batch"][warm:]) * 1e3, 2),
        batch_over_window=round(median(ratios), 3),
        spread=[round(ratios[len(ratios) // 10], 3), round(ratios[-1 - len(ratios) // 10], 3)],
    )
    print(benchmark.extra_info)
