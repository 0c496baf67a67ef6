"""A training step of SASRec beside a plain PyTorch loop: `python ci/benchmarks/plain_sasrec.py --json FILE`.

Both train the encoder of docs/examples/sasrec.py on MovieLens-100K, 128 samples of at most 50 tokens, with 32
negatives, sampled softmax and dropout 0.2. The plain loop has an embedding of all items, padded sequences and
one optimizer for everything, Adam, whose update visits every row; or SparseAdam for the rows. Ours has a
dynamic table, updates the rows that were used, and converts torch's modules; `"batch"` has the same bits for
any split.

One thread and its processor time; contenders take turns step by step on the same batches, and medians over
the steps after the first five are printed. A step gets a copy of its batch, which it must not change, and its
loss must be a number (`honest`); the mean losses of the last ten steps must agree within 2 %. Each side draws
its own initial rows and dropout.
"""

from __future__ import annotations

import math
import time
from statistics import mean, median

import torch
from frame import example, options_of, record
from honest import Given, Rounds, by_turns, clocked, copied
from kernel_cases import moved

import tritonrec
from tritonrec import nn
from tritonrec.data import JaggedBatch, NextItemLoader, load_interactions
from tritonrec.distributed import Communicators
from tritonrec.host_memory import keep_freed_memory

BATCH, NEGATIVES, RATE, WARM = 128, 32, 1e-3, 5


class Plain:
    """A loop as people write it; `items` ids from 0."""

    def __init__(self, sasrec, items: int, sparse: bool):
        self.length, self.encoder = sasrec.LENGTH, sasrec.SASRec()
        self.items = torch.nn.Embedding(items, sasrec.DIM, sparse=sparse)
        torch.nn.init.uniform_(self.items.weight, -(sasrec.DIM**-0.5), sasrec.DIM**-0.5)
        dense = list(self.encoder.parameters())
        if sparse:
            rows = [torch.optim.SparseAdam(self.items.parameters(), RATE)]
            self.optimizers = [torch.optim.Adam(dense, RATE, fused=True), *rows]
        else:
            self.optimizers = [torch.optim.Adam([*dense, self.items.weight], RATE, fused=True)]

    def step(self, batch: JaggedBatch) -> float:
        lengths = batch.lengths
        ends = torch.arange(self.length)[None] >= self.length - lengths[:, None]  # padded on the left
        ids = torch.zeros(len(lengths), self.length, dtype=torch.int64)
        ids[ends] = batch.ids
        hidden = self.encoder(self.items(ids), ~ends)[ends]
        candidates = torch.cat([batch.labels[:, None], batch.negatives], 1)
        scores = (self.items(candidates) @ hidden[:, :, None]).squeeze(2)
        repeated = batch.negatives == batch.labels[:, None]
        scores[:, 1:] = scores[:, 1:].masked_fill(repeated, -torch.inf)
        target = torch.zeros(len(scores), dtype=torch.int64)
        loss = torch.nn.functional.cross_entropy(scores, target)
        for each in self.optimizers:
            each.zero_grad()
        loss.backward()
        for each in self.optimizers:
            each.step()
        return float(loss.detach())


class Ours:
    def __init__(self, sasrec, consistency: str):
        model = nn.PaddedNextItem(sasrec.SASRec(), sasrec.LENGTH)
        nn.convert(model)
        rows = tritonrec.RowOptimizer("adam", RATE)
        tables = tritonrec.HashTableCollection([tritonrec.FeatureConfig("item", sasrec.DIM)], rows)
        optimizer = torch.optim.Adam(model.parameters(), RATE, fused=True)
        window = tritonrec.WindowConfig(1, consistency)
        parts = model, tables, optimizer, Communicators.local()
        self.trainer = tritonrec.Trainer(*parts, "sequential", window)

    def step(self, batch: JaggedBatch) -> float:
        result = self.trainer.step(batch)
        return float(result.losses.double().sum()) / len(batch.labels)


def measure(steps: int) -> dict[str, dict[str, float]]:
    sasrec = example()
    loader = NextItemLoader(load_interactions("ml-100k"), BATCH, sasrec.LENGTH, NEGATIVES, seed=0)
    items = int(loader.catalogue.max()) + 1
    sides: dict[str, Plain | Ours] = {}
    for name in ("tritonrec, window", "tritonrec, batch", "PyTorch, Adam", "PyTorch, SparseAdam"):
        torch.manual_seed(0)
        side, _, kind = name.partition(", ")
        sides[name] = Ours(sasrec, kind) if side == "tritonrec" else Plain(sasrec, items, "Sparse" in kind)
    losses: dict[str, list[float]] = {name: [] for name in sides}

    def rounds_of(name: str) -> Rounds:
        def check(loss: float, _batch: JaggedBatch) -> None:
            assert math.isfinite(loss), "no loss"
            losses[name].append(loss)

        return lambda number: Given(sides[name].step, (copied(loader.batch(number)),), check)

    least_bytes = moved(*sasrec.SASRec().parameters(), times=6)  # with Adam's moments, in and out
    contenders = {name: rounds_of(name) for name in sides}
    seconds = by_turns(
        contenders, steps - 1, least_bytes, clocked(time.process_time), until=math.inf
    )  # the first step is not counted
    last = {name: mean(each[-10:]) for name, each in losses.items()}
    assert max(last.values()) <= 1.02 * min(last.values()), last
    return {
        name: {
            "milliseconds": 1e3 * median(seconds[name][WARM - 1 :]),
            "loss of the last ten steps": last[name],
        }
        for name in sides
    }


def main() -> None:
    options = options_of(__doc__, steps=40)
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = measure(options.steps)
    ours = rows["tritonrec, batch"]["milliseconds"]
    for name, row in rows.items():
        took, loss = row.values()
        print(f"{name:22s} {took:7.1f} ms, {took / ours:.2f} of ours with batch, loss {loss:.4f}")
    record(options, rows=rows)


if __name__ == "__main__":
    main()
