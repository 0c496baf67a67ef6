"""A DLRM's training step beside TorchRec's and plain torch's: the same model, rows, batches and optimizer.

    bash ci/benchmarks/torchrec.sh          # TorchRec and FBGEMM's CPU build, into out/torchrec
    python ci/benchmarks/measure_dlrm.py --batch-size 512,2048,8192 --ranks 1,2 --json FILE

26 categorical features with skewed ids and 13 dense ones in the shape of Criteo's, rows of 64, MLPs of
512-256-64 and 512-256, SGD. Contenders take turns in the same processes, some new batches each turn. TorchRec
has an EmbeddingBagCollection of whole tables, dealt to the ranks, with FBGEMM's fused update; torch has one
embedding of all rows with a sparse gradient. Before the clock starts the peers get their batches in their own
form, and our tables have all rows. Losses of every step are compared before a time is printed.

A figure is the peer's processor time over ours, medians over the turns: other processes disturb it least;
over several ranks it is that of all. Above 1 is faster.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import replace
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from frame import options_of, over, record
from torch import nn
from torchrec_peer import (
    TORCHREC,
    Features,
    Run,
    TorchRecModel,
    compare,
    environment_beside_torchrec,
    find_torchrec,
    quiet,
    sharded,
    trained,
)

from tritonrec import ops
from tritonrec.data import ClickBatch, ClickLoader, ClickLog
from tritonrec.distributed import Communicators, RankPool
from tritonrec.harness.job import Job
from tritonrec.nn import DLRM, HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig

OURS = {
    "window, N = 1": WindowConfig(1, "window"),
    "window, N = 4": WindowConfig(4, "window"),
    "batch, N = 1": WindowConfig(1, "batch"),
    "batch, N = 4": WindowConfig(4, "batch"),
}
WARM = 2
"""Turns before the times count: kernels compile, tables grow, allocators settle."""


class Dense(nn.Module):
    """The dense part of `tritonrec.nn.DLRM` in torch's modules, with its initial values."""

    def __init__(self, model: DLRM):
        super().__init__()
        assert model.bottom is not None
        self.bottom, self.top = of_torch(model.bottom), of_torch(model.top)
        vectors = len(model.config.features) + 1
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits (B,) from dense features (B, F) and rows (B, C, d)."""
        x = torch.relu(self.bottom(dense))
        vectors = torch.cat([x[:, None], rows], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], 1)).squeeze(1)


def of_torch(layers: nn.ModuleList) -> nn.Sequential:
    """torch's linear layers with the values of ours, ReLU between them."""
    made: list[nn.Module] = []
    for layer in layers:
        made += [nn.Linear(layer.in_features, layer.out_features), nn.ReLU()]
        made[-2].load_state_dict(layer.state_dict())
    return nn.Sequential(*made[:-1])


def losses_of(logits: torch.Tensor, batch: ClickBatch) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, batch.labels.float(), reduction="none")


def ids_of(batch: ClickBatch) -> torch.Tensor:
    """(C, B) of a batch whose samples have one id of each feature."""
    return batch.features.values.view(len(batch.features.keys), -1)


class Ours:
    def __init__(self, job: Job, sizes: dict[str, int], communicators: Communicators, window: WindowConfig):
        model, tables, optimizer = job.build("sgd")
        for name, size in sizes.items():  # as the peers' tables, which have every row from the beginning
            group, member = tables._group(name)
            keys = group.layout.pack(member, torch.arange(size), name)
            own = ops.owner_of(keys, communicators.world_size) == communicators.rank
            tables.load(name, own.nonzero()[:, 0], tables.initial_rows(name, own.nonzero()[:, 0]))
        self.trainer = Trainer(model, tables, optimizer, communicators, "nestpipe", window)

    def prepare(self, batches: list[ClickBatch]) -> list[ClickBatch]:
        return batches

    def train(self, batches: list[ClickBatch]) -> list[float]:
        return [float(result.losses.double().mean()) for result in self.trainer.run(iter(batches))]


class Torch:
    """One embedding of all features' rows."""

    def __init__(self, job: Job, sizes: dict[str, int]):
        model, tables, _ = job.build("sgd")
        rows = torch.cat([tables.initial_rows(name, torch.arange(size)) for name, size in sizes.items()])
        self.dense, self.rows = Dense(model), nn.Embedding.from_pretrained(rows, freeze=False, sparse=True)
        self.first = torch.tensor([0, *sizes.values()]).cumsum(0)[:-1, None]
        self.optimizer = torch.optim.SGD([*self.dense.parameters(), *self.rows.parameters()], lr=job.lr)

    def prepare(self, batches: list[ClickBatch]) -> list[tuple[ClickBatch, torch.Tensor]]:
        return [(batch, (ids_of(batch) + self.first).t().contiguous()) for batch in batches]

    def train(self, batches: list[tuple[ClickBatch, torch.Tensor]]) -> list[float]:
        losses = []
        for batch, ids in batches:
            self.optimizer.zero_grad()
            loss = losses_of(self.dense(batch.dense, self.rows(ids)), batch).mean()
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses


class TorchRec:
    """Whole tables dealt to the ranks, in a plain loop or `TrainPipelineSparseDist`."""

    def __init__(self, job: Job, sizes: dict[str, int], world: int, pipelined: bool):
        dense, self.features, self.pipelined = Dense(job.build("sgd")[0]), tuple(sizes), pipelined

        def losses(model: nn.Module, batch: ClickBatch, rows: torch.Tensor) -> torch.Tensor:
            return losses_of(model(batch.dense, rows), batch)

        whole = TorchRecModel(sizes, job.sizes.dim, dense, losses, bags=True)
        self.model, self.optimizer = sharded(whole, job, sizes, "sgd", world)

    def prepare(self, batches: list[ClickBatch]) -> list[Features]:
        return [Features(batch, self.features, 1 / batch.num_samples, bags=True) for batch in batches]

    def train(self, batches: list[Features]) -> list[float]:
        sums = trained(self.model, self.optimizer, batches, self.pipelined)
        return [each / features.batch.num_samples for each, features in zip(sums, batches, strict=True)]


def job_of(batch_size: int, steps: int, dim: int) -> Job:
    sizes = HSTUConfig(dim=dim)
    data = f"criteo:samples={batch_size * steps * 10 // 9 + 16},scale=0.03,exponent=1.05,seed=3"
    return Job(
        data, "dlrm", batch_size, sizes=sizes, bottom=(512, 256, 64), top=(512, 256), lr=0.05, slots=1 << 16
    )


def numbered(log: ClickLog) -> ClickLog:
    """The log with each column's ids as numbers from 0, which the peers' tables need."""
    columns = [np.unique(column, return_inverse=True)[1] for column in log.categories.T]
    return replace(log, categories=np.stack(columns, 1).astype(np.int64))


def measure_rank(
    communicators: Communicators, batch_size: int, dim: int, per_turn: int, turns: int, threads: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, Run]]:
    """This rank's processor seconds and wall seconds of a step, by contender and turn, and its losses."""
    torch.set_num_threads(threads)
    quiet()
    world, job = communicators.world_size, job_of(batch_size, per_turn * (turns + WARM), dim)
    log = numbered(job.loader().log)
    loader = ClickLoader(log, batch_size, job.seed, communicators.rank, world)
    sizes = dict(zip(log.features, (1 + log.categories.max(0)).tolist(), strict=True))
    contenders: dict[str, Ours | Torch | TorchRec] = {}
    if TORCHREC.is_dir():
        contenders["TorchRec"] = TorchRec(job, sizes, world, False)
        contenders["TorchRec, SparseDist"] = TorchRec(job, sizes, world, True)
    if world == 1:
        contenders["torch, one embedding"] = Torch(job, sizes)
    contenders |= {name: Ours(job, sizes, communicators, window) for name, window in OURS.items()}
    cpu, wall, losses = defaultdict(list), defaultdict(list), defaultdict(list)
    for turn in range(turns + WARM):
        batches = [loader.batch(turn * per_turn + step) for step in range(per_turn)]
        for name in contenders if turn % 2 else reversed(contenders):
            ready = contenders[name].prepare(batches)
            communicators.control.all_reduce(torch.zeros(1), "start together")
            began = time.perf_counter(), time.process_time()
            losses[name] += contenders[name].train(ready)
            taken = time.perf_counter() - began[0], time.process_time() - began[1]
            if turn >= WARM:
                wall[name].append(taken[0] / per_turn)
                cpu[name].append(taken[1] / per_turn)
    for each in contenders.values():
        if isinstance(each, Ours):
            each.trainer.close()
    return dict(cpu), dict(wall), {name: Run([], each) for name, each in losses.items()}


def measure(batch_size: int, ranks: int, options: argparse.Namespace) -> dict[str, object]:
    """Print and return a row: milliseconds and ratios by contender."""
    with RankPool((ranks,)) as pool:
        found = pool.run(
            measure_rank, ranks, batch_size, options.dim, options.per_turn, options.turns, options.threads
        )
    for _, _, runs in found:
        compare(runs, next(iter(runs)))
    names = list(found[0][0])
    cpu = {
        name: [sum(each) for each in zip(*(part[0][name] for part in found), strict=True)] for name in names
    }
    wall = {
        name: [max(each) for each in zip(*(part[1][name] for part in found), strict=True)] for name in names
    }
    peers = [name for name in names if name not in OURS]
    best = min(peers, key=lambda name: median(cpu[name])) if peers else names[0]
    print(f"batch {batch_size}, {ranks} rank(s), {options.threads} thread(s); the best peer is {best}")
    row: dict[str, object] = {"batch": batch_size, "ranks": ranks, "peer": best}
    for name in names:
        times = {"cpu": cpu, "wall": wall}
        ms = {clock: 1e3 * median(of[name]) for clock, of in times.items()}
        ratio = {clock: over(of[best], of[name]) for clock, of in times.items()}
        print(
            f"  {name:22s} {ms['cpu']:9.1f} ms cpu {ratio['cpu']:6.2f}x   {ms['wall']:9.1f} ms wall "
            f"{ratio['wall']:6.2f}x",
            flush=True,
        )
        row[name] = {"ms": ms, "ratio": ratio}
    return row


def main() -> None:
    options = options_of(
        __doc__, dim=64, batch_size={"default": (512, 2048, 8192), "help": "of all ranks, between commas"},
        ranks={"default": (1,), "help": "world sizes between commas"},
        threads={"default": 1, "help": "of each rank"},
        per_turn={"default": 4, "help": "batches of a turn"},
        turns={"default": 5, "help": "whose median counts"},
    )  # fmt: skip
    if TORCHREC.is_dir():
        find_torchrec()
    else:
        print("TorchRec is not there (bash ci/benchmarks/torchrec.sh): torch is the only peer")
    rows = [measure(batch, ranks, options) for ranks in options.ranks for batch in options.batch_size]
    record(options, environment_beside_torchrec(), rows=rows)


if __name__ == "__main__":
    main()
