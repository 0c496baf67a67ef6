"""What more tables, wider rows, micro-batches and ranks cost: ratios of processor time of a training step.

    python ci/benchmarks/measure_scaling.py

Variants of a row take turns in one process with one thread; the figure is the ratio of their medians. Several
ranks are processes: their times are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from statistics import median

import torch
import torch.nn.functional as F
from frame import by_turns, options_of, over, record
from measure_dlrm import Dense, ids_of

from tritonrec.data import ClickBatch, KeyedJaggedTensor
from tritonrec.distributed import Communicators, RankPool
from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer
from tritonrec.host_memory import keep_freed_memory
from tritonrec.nn import DLRM, DLRMConfig
from tritonrec.pipeline import Trainer, WindowConfig

PER_TURN, WARM, TURNS, RANKS = 4, 2, 5, 4


class Sum(torch.nn.Module):
    """Losses from the sums of all rows alone: what is measured is the tables."""

    def forward(self, batch, rows, seed=0):
        return torch.tanh(sum(each.sum(1) for each in rows.values()) / 100)


def clicks(features: int, size: int, ids: int, dense: int = 0, rank: int = 0) -> list[ClickBatch]:
    draw, names = torch.Generator().manual_seed(rank), [f"f{number}" for number in range(features)]
    return [
        ClickBatch(
            step, torch.arange(size) + (step * RANKS + rank) * size,
            KeyedJaggedTensor.from_matrix(
                names, (torch.rand(size, features, generator=draw) ** 3 * ids).long()
            ),
            torch.rand(size, dense, generator=draw), torch.randint(0, 2, (size,), generator=draw),
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


def dlrm(
    window: WindowConfig, features: int, widths: tuple[int, ...], size: int, here: Communicators | None = None
) -> Callable[[], list]:
    """Steps of a turn of a DLRM whose rows have 16 numbers; `widths` of its MLPs."""
    here = here or Communicators.local()
    batches = iter(clicks(features, size // here.world_size, 100_000, 13, here.rank))
    names = tuple(f"f{number}" for number in range(features))
    model = DLRM(DLRMConfig(names, dense=13, dim=16, bottom=widths, top=widths))
    tables = HashTableCollection([FeatureConfig(name, 16) for name in names], RowOptimizer("sgd", lr=0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, tables, optimizer, here, "nestpipe", window, trust_model=True)
    return lambda: list(trainer.run(islice(batches, PER_TURN)))


def plain(count: int, size: int) -> Callable[[], None]:
    """The same DLRM in torch's modules, its batches in so many parts."""
    batches, names = iter(clicks(26, size, 100_000, 13)), tuple(f"f{number}" for number in range(26))
    dense = Dense(DLRM(DLRMConfig(names, dense=13, dim=16, bottom=(256, 64), top=(256, 64))))
    rows = torch.nn.Embedding(26 * 100_000, 16, sparse=True)
    first, optimizer = (
        torch.arange(26)[:, None] * 100_000,
        torch.optim.SGD([*dense.parameters(), rows.weight], 0.01),
    )

    def turn() -> None:
        for batch in islice(batches, PER_TURN):
            optimizer.zero_grad()
            whole = (batch.dense, (ids_of(batch) + first).t(), batch.labels.float())
            for values, ids, labels in zip(*(each.chunk(count) for each in whole), strict=True):
                logits = dense(values, rows(ids))
                F.binary_cross_entropy_with_logits(logits, labels, reduction="sum").div(size).backward()
            optimizer.step()

    return turn


def light(here: Communicators) -> list[float]:
    """Seconds of a turn of a rank: eight light tables, 512 samples over all ranks."""
    return by_turns({"": dlrm(WindowConfig(1), 8, (16,), 512, here)}, TURNS, warm=WARM)[""].cpu


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
    calls = {
        title: {name: variant(*given) for name, given in variants.items()} for title, variants in rows.items()
    }
    for kind in ("window", "batch"):
        calls[f"micro-batches of a DLRM, 2,048 samples, {kind}"] = {
            f"N = {count}, {kind}": dlrm(WindowConfig(count, kind), 26, (256, 64), 2048)
            for count in (1, 4, 32)
        }
    calls["the same in plain torch"] = {f"N = {count}, torch": plain(count, 2048) for count in (1, 4, 32)}
    found = {}
    for title, variants in calls.items():
        times = by_turns(variants, TURNS, warm=WARM)
        first, *_ = times.values()
        print(title)
        for name, each in times.items():
            found[name] = median(each.cpu) / PER_TURN * 1e3
            print(f"  {name:32s} {found[name]:8.1f} ms  {over(each.cpu, first.cpu):5.2f}", flush=True)
    print("ranks, eight light tables, 512 samples")
    for ranks in (1, 2, RANKS):
        with RankPool([ranks]) as pool:
            found[f"{ranks} ranks"] = sum(map(median, pool.run(light, ranks))) / PER_TURN * 1e3
        name = f"{ranks} ranks"
        print(f"  {name:32s} {found[name]:8.1f} ms  {found[name] / found['1 ranks']:5.2f}", flush=True)
    record(options, ms=found)


if __name__ == "__main__":
    main()
