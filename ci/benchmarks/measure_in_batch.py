"""A step with in-batch softmax beside plain PyTorch doing the same: GradCache over N micro-batches.

    python ci/benchmarks/measure_in_batch.py

Both have two MLP towers on rows of one user and one item each, under Adam. PyTorch's rows are a dense
`torch.nn.Embedding`, whose whole table Adam updates, or with sparse gradients under SparseAdam. Printed is
CPU time of one thread, the median of the steps after the first ones, and the bytes that a sample shows.
"""

from __future__ import annotations

import statistics
import time

import torch
from frame import options_of

from tritonrec import (
    Communicators,
    FeatureConfig,
    HashTableCollection,
    RowOptimizer,
    Trainer,
    WindowConfig,
    nn,
)
from tritonrec.data import Batch, KeyedJaggedTensor, Lookup

DIM, HIDDEN, IDS, WARM_UP, SCALE = 64, 128, 50_000, 4, 8.0


class Towers(torch.nn.Module):
    """Of tritonrec; `Plain` has torch's modules and its own table."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.MLP(DIM, HIDDEN, DIM), nn.MLP(DIM, HIDDEN, DIM)

    def forward(self, batch: Batch, rows: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
        """What the samples show."""
        ids = batch.lookups()["item"].ids
        return {"user": self.user(rows["user"]), "item": self.item(rows["item"]), "id": ids}

    def window_loss(self, own, window, positions):
        """In-batch softmax."""
        return nn.in_batch_softmax(own["user"], window["item"], positions, window["id"], None, SCALE)


class Plain(torch.nn.Module):
    """The same towers."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows = torch.nn.ModuleList(torch.nn.Embedding(IDS, DIM, sparse=sparse) for _ in range(2))
        self.towers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(DIM, HIDDEN), torch.nn.SiLU(), torch.nn.Linear(HIDDEN, DIM))
            for _ in range(2)
        )

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """(b, 2) ids of users and items."""
        return [
            tower(rows(each)) for tower, rows, each in zip(self.towers, self.rows, ids.unbind(1), strict=True)
        ]


def ids_of(step: int, size: int) -> torch.Tensor:
    """(size, 2), skewed."""
    random = torch.Generator().manual_seed(step)
    return (torch.rand(size, 2, generator=random) ** 3 * IDS).long()


def ours(size: int, count: int, steps: int) -> list[float]:
    """Seconds of each step."""
    model = Towers()
    features = [FeatureConfig("user", DIM), FeatureConfig("item", DIM)]
    tables = HashTableCollection(features, RowOptimizer("adam", lr=1e-3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    times = []
    with Trainer(
        model, tables, optimizer, Communicators.local(), "sequential", WindowConfig(count)
    ) as trainer:
        for step in range(steps):
            ids = ids_of(step, size)
            lookups = {"user": Lookup(ids[:, 0].contiguous()), "item": Lookup(ids[:, 1].contiguous())}
            batch = Batch(step, torch.arange(size), KeyedJaggedTensor.from_dict(lookups))
            began = time.process_time()
            trainer.step(batch)
            times.append(time.process_time() - began)
    return times


def plain(size: int, count: int, steps: int, sparse: bool) -> list[float]:
    """Seconds of each step."""
    model = Plain(sparse)
    dense = torch.optim.Adam(model.towers.parameters(), lr=1e-3, fused=True)
    of_rows = (torch.optim.SparseAdam if sparse else torch.optim.Adam)(list(model.rows.parameters()), lr=1e-3)
    times = []
    for step in range(steps):
        ids = ids_of(step, size)
        began = time.process_time()
        parts = ids.chunk(count)
        with torch.no_grad():
            shown = [torch.cat(each) for each in zip(*map(model, parts), strict=True)]
        user, item = (each.requires_grad_() for each in shown)
        same = (ids[:, 1:] == ids[:, 1]) & ~torch.eye(size, dtype=torch.bool)
        logits = (user @ item.T / SCALE).masked_fill(same, -torch.inf)
        torch.nn.functional.cross_entropy(logits, torch.arange(size)).backward()
        for part, *gradients in zip(parts, user.grad.chunk(count), item.grad.chunk(count), strict=True):
            torch.autograd.backward(model(part), gradients)
        for optimizer in (dense, of_rows):
            optimizer.step()
            optimizer.zero_grad()
        times.append(time.process_time() - began)
    return times


def main(steps: int) -> None:
    """Print a table."""
    torch.set_num_threads(1)
    print("| B | N | tritonrec, ms | torch, dense rows | torch, sparse rows | over sparse |")
    for size, count in [(256, 1), (256, 4), (1024, 1), (1024, 4), (1024, 16)]:
        found = [ours(size, count, steps), plain(size, count, steps, False), plain(size, count, steps, True)]
        a, b, c = (1e3 * statistics.median(each[WARM_UP:]) for each in found)
        print(f"| {size} | {count} | {a:.1f} | {b:.1f} | {c:.1f} | {a / c:.2f} |", flush=True)
    print(f"a sample shows {8 + 2 * 4 * DIM + 8} bytes")


if __name__ == "__main__":
    main(options_of(__doc__, steps=16).steps)
