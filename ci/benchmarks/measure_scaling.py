"""What more tables and wider rows cost: ratios of processor time of a training step.

    python ci/benchmarks/measure_scaling.py

Variants of a row take turns in one process with one thread; the figure is the ratio of their medians.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from statistics import median

import torch
from frame import by_turns, options_of, over, record

from tritonrec.data import ClickBatch, KeyedJaggedTensor
from tritonrec.distributed import Communicators
from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer
from tritonrec.host_memory import keep_freed_memory
from tritonrec.pipeline import Trainer, WindowConfig

PER_TURN, WARM, TURNS = 4, 2, 5


class Sum(torch.nn.Module):
    """Losses from the sums of all rows alone: what is measured is the tables."""

    def forward(self, batch, rows, seed=0):
        return torch.tanh(sum(each.sum(1) for each in rows.values()) / 100)


def clicks(features: int, size: int, ids: int) -> list[ClickBatch]:
    draw, names = torch.Generator().manual_seed(0), [f"f{number}" for number in range(features)]
    return [
        ClickBatch(
            step, torch.arange(size) + step * size,
            KeyedJaggedTensor.from_matrix(
                names, (torch.rand(size, features, generator=draw) ** 3 * ids).long()
            ),
            torch.zeros(size, 0), torch.zeros(size, dtype=torch.int64),
        )
        for step in range((WARM + TURNS) * PER_TURN)
    ]  # fmt: skip


def variant(dims: list[int], size: int, ids: int) -> Callable[[], list]:
    """Steps of a turn with tables of these dimensions, so many samples and distinct ids."""
    features = [FeatureConfig(f"f{number}", dim) for number, dim in enumerate(dims)]
    tables = HashTableCollection(features, RowOptimizer("sgd", lr=0.01))
    here, window = Communicators.local(), WindowConfig(1)
    trainer = Trainer(Sum(), tables, None, here, "sequential", window, trust_model=True)
    batches = iter(clicks(len(dims), size, ids))
    return lambda: list(trainer.run(islice(batches, PER_TURN)))


def main() -> None:
    options = options_of(__doc__)
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = {
        "tables": {
            "one table of as many ids": ([108], 64 * 200, 10_000),
            "one table of as many rows": ([108], 64 * 200, 2_000_000),
            "200 tables of one dimension": ([108] * 200, 64, 10_000),
            "200 tables of 200 dimensions": ([8 + number for number in range(200)], 64, 10_000),
        },
        "columns, 16,384 ids": {f"dimension {dim}": ([dim], 16_384, 200_000) for dim in (256, 1024)},
    }
    found = {}
    for title, variants in rows.items():
        times = by_turns({name: variant(*given) for name, given in variants.items()}, TURNS, warm=WARM)
        first, *_ = times.values()
        print(title)
        for name, each in times.items():
            found[name] = median(each.cpu) / PER_TURN * 1e3
            print(f"  {name:32s} {found[name]:8.1f} ms  {over(each.cpu, first.cpu):5.2f}", flush=True)
    record(options, ms=found)


if __name__ == "__main__":
    main()
