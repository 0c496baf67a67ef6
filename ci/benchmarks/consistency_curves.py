"""Loss, HR and NDCG over training of synchronous, nestpipe, stale and averaged updates (NestPipe, Figure 6).

    python ci/benchmarks/consistency_curves.py --json out/curves.json --png docs/curves.png
    python ci/benchmarks/consistency_curves.py --model fuxi,hstu --seeds 5
    python ci/benchmarks/consistency_curves.py --optimizer adagrad --lr 0.03 \
        --methods synchronous,averaged,averaged-4,scaled,scaled-4,late,late-4,scaled-late,scaled-late-4

Each user's last item is the test, the rest trains; ranked is the whole catalogue without the items seen. All
methods have the batches of a seed in one order, its initial values, and two ranks:

    synchronous   one stage after another
    nestpipe      N = 4; it must have the bits of synchronous, losses and scores, or nothing is printed
    stale         APPROXIMATE, as prefetching without synchronisation does it: the forward pass of a batch
                  takes rows as they were before the last update; its own update goes to the newer rows
    averaged      APPROXIMATE, 2D sparse parallelism as in its source: two copies, averaged in every update;
                  averaged-4 in every fourth, averaged-16 in every sixteenth
    scaled        APPROXIMATE, the same with `moment_scaling`, of Adagrad; scaled-4, scaled-16
    late          APPROXIMATE, averaged with `late_states`, of Adagrad; and so scaled-late, each with -4, -16
    held          APPROXIMATE, averaged with `average_holders`; held-4, held-16

`stale` is no mode of the library, whose schedule check refuses it. It is deterministic: around the stages of
`sequential` three functions put the rows as they were before the last update into the buffer while they are
sent, and the newer ones back before they are updated.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np
import torch
from frame import options_of, record
from torch import Tensor

import tritonrec
from tritonrec import nn, ops
from tritonrec.data import Interactions, JaggedBatch, NextItemLoader, evaluate, load_interactions
from tritonrec.distributed import Communicators, RankPool
from tritonrec.embedding import OptimizerName
from tritonrec.pipeline.places import Buffer, OwnedRows
from tritonrec.pipeline.program import Program
from tritonrec.pipeline.stage import Read, Update

METHODS = ("synchronous", "nestpipe", "stale", "averaged")
COLOURS = {
    "synchronous": "#000000", "nestpipe": "#0072b2", "stale": "#d55e00",
    "averaged": "#009e73", "averaged-4": "#cc79a7", "averaged-16": "#e69f00",
    "scaled": "#56b4e9", "scaled-4": "#f0e442", "scaled-16": "#999999",
    "late": "#882255", "late-4": "#aa4499", "late-16": "#cc6677",
    "scaled-late": "#44aa99", "scaled-late-4": "#117733", "scaled-late-16": "#999933",
    "held": "#6699cc", "held-4": "#004488", "held-16": "#bb5566",
}  # fmt: skip
MODELS = {"fuxi": (nn.FuXi, nn.FuXiConfig), "hstu": (nn.HSTU, nn.HSTUConfig)}
METRICS = ("loss", "HR@10", "HR@50", "NDCG@10", "NDCG@50")
RANKS, DIM, LENGTH, NEGATIVES, BATCH = 2, 32, 50, 16, 64


class Stale:
    """Rows of batch t are sent as they were before the update of batch t - 1."""

    def __init__(self, program: Program):
        self.before: list[tuple[Tensor, Tensor]] = []
        self.newer: list[Tensor] = []
        program.before("exchange", self.older_rows)
        program.after("exchange", self.newer_rows)
        program.before("sparse_update", self.remember)

    def older_rows(self, owned: Read[OwnedRows], buffer: Update[Buffer]) -> None:
        self.newer = [rows.clone() for rows in buffer]
        for (keys, values), table, rows in zip(self.before, owned.tables, buffer, strict=bool(self.before)):
            here, there = ops.intersect(keys, table.keys)
            rows[there] = values[here]

    def newer_rows(self, buffer: Update[Buffer]) -> None:
        for rows, newer in zip(buffer, self.newer, strict=True):
            rows.copy_(newer)

    def remember(self, owned: Read[OwnedRows], buffer: Read[Buffer]) -> None:
        self.before = [
            (table.keys.clone(), rows.clone()) for table, rows in zip(owned.tables, buffer, strict=True)
        ]


def build(model: str, seed: int) -> torch.nn.Module:
    """The dense model; its initial values follow from the seed."""
    torch.manual_seed(seed)
    kind, config = MODELS[model]
    return kind(config(dim=DIM, layers=2, heads=2, qk_dim=16, v_dim=16, max_seq_len=LENGTH, dropout=0.2))


def average_every(method: str) -> int:
    """Updates from one average of the copies to the next; 0 for one copy."""
    *names, last = method.split("-")
    every = int(last) if last.isdigit() else 1
    return every if {*names, last} & {"averaged", "scaled", "late", "held"} else 0


def train_rank(
    communicators: Communicators,
    method: str,
    model: str,
    seed: int,
    epochs: int,
    log: Interactions,
    rule: OptimizerName,
    lr: float,
) -> list[tuple[float, dict[str, Tensor], tuple[Tensor, Tensor]]]:
    """After each epoch: the sum of this rank's losses, the dense parameters, ids and rows of its shard."""
    dense = build(model, seed)
    tables = tritonrec.HashTableCollection(
        [tritonrec.FeatureConfig("item", DIM)], tritonrec.RowOptimizer(rule, lr), seed=seed
    )
    loader = NextItemLoader(log, BATCH, LENGTH, NEGATIVES, seed, communicators.rank, communicators.world_size)
    pipelined = method == "nestpipe"
    every = average_every(method)
    window = tritonrec.WindowConfig(
        4 if pipelined else 1, seed=seed, average_every=every, moment_scaling="scaled" in method,
        late_states="late" in method, average_holders="held" in method,
    )  # fmt: skip
    mode = "nestpipe" if pipelined else "sequential"
    kind = torch.optim.Adam if rule == "adam" else torch.optim.Adagrad
    optimizer = kind(dense.parameters(), lr=lr)
    found = []
    with tritonrec.Trainer(dense, tables, optimizer, communicators, mode, window) as trainer:
        if method == "stale":
            Stale(trainer.program)
        for epoch in range(epochs):
            steps = range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch)
            losses = [result.losses.double().sum() for result in trainer.run(map(loader.batch, steps))]
            if every:
                trainer.sync()
            state = {name: value.detach().clone() for name, value in dense.state_dict().items()}
            ids, rows = tables.export()["item"]
            found.append((float(torch.stack(losses).sum()), state, (ids, rows[:, :DIM].clone())))
    return found


def scores(model: torch.nn.Module, ids: Tensor, rows: Tensor, loader: NextItemLoader) -> dict[str, float]:
    """HR and NDCG of the held-out items; an id without a row has zeros."""
    place = {item: number for number, item in enumerate(ids.tolist())}
    known = torch.cat([rows, rows.new_zeros(1, DIM)])

    def look_up(items: Tensor) -> Tensor:
        return known[torch.tensor([place.get(item, len(rows)) for item in items.tolist()])]

    def score(history: JaggedBatch) -> Tensor:
        with torch.no_grad():
            hidden = model.encode(history, look_up(history.ids))
        return ops.linear(hidden[history.offsets[1:] - 1], look_up(loader.catalogue), None)

    return evaluate(score, loader, (10, 50))


def curve(pool: RankPool, method: str, model: str, seed: int, args: argparse.Namespace) -> dict:
    """Metrics after each epoch, and the final rows."""
    whole = load_interactions(args.data)
    sequences = whole.sequences
    kept = np.sort(np.delete(sequences.rows, sequences.offsets[1:] - 1))
    log = Interactions(whole.user[kept], whole.item[kept], whole.timestamp[kept])
    replicas = RANKS if average_every(method) else 1
    values = method, model, seed, args.epochs, log, args.optimizer, args.lr
    parts = pool.run(train_rank, RANKS, *values, replicas=replicas)
    loader = NextItemLoader(whole, BATCH, LENGTH, 1, seed=seed)
    terms = sum(int(NextItemLoader(log, BATCH, LENGTH, 1, seed=seed).batch(step).num_tokens)
                for step in range(loader.steps_per_epoch))  # fmt: skip
    points = []
    dense = build(model, seed).eval()
    for of_ranks in zip(*parts, strict=True):
        dense.load_state_dict(of_ranks[0][1])
        ids = torch.cat([ids for _, _, (ids, _) in of_ranks[::replicas]])
        rows = torch.cat([rows for _, _, (_, rows) in of_ranks[::replicas]])
        loss = sum(loss for loss, _, _ in of_ranks) / terms
        points.append({"loss": loss, **scores(dense, ids, rows, loader)})
    order = ids.argsort()
    return {"points": points, "rows": rows[order]}


def draw(document: dict, path: Path) -> None:
    """Loss, HR@10 and NDCG@10 over epochs, mean of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = ("loss", "HR@10", "NDCG@10")
    models = list(dict.fromkeys(row["model"] for row in document["rows"]))
    figure, grid = pyplot.subplots(
        len(models), 3, figsize=(11, 3.2 * len(models)), squeeze=False, layout="constrained"
    )
    for line, model in zip(grid, models, strict=True):
        for axes, metric in zip(line, shown, strict=True):
            for method in dict.fromkeys(row["method"] for row in document["rows"]):
                runs = [
                    [point[metric] for point in row["points"]]
                    for row in document["rows"]
                    if (row["model"], row["method"]) == (model, method)
                ]
                mean = np.mean(runs, axis=0)
                exact = method in ("synchronous", "nestpipe")
                axes.plot(
                    range(1, len(mean) + 1), mean, label=method if exact else f"{method}, approximate",
                    color=COLOURS[method], ls="--" if method == "nestpipe" else "-",
                )  # fmt: skip
            axes.set_title(f"{model}: {metric}", fontsize=10)
            axes.set_xlabel("epoch")
    grid[0][0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def summary(rows: list[dict]) -> list[dict]:
    """By model and method: the last epoch, and its mean and deviation over the seeds minus synchronous."""
    exact = {(row["model"], row["seed"]): row["points"][-1] for row in rows if row["method"] == "synchronous"}
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for method in dict.fromkeys(row["method"] for row in rows):
            runs = [row for row in rows if (row["model"], row["method"]) == (model, method)]
            line: dict = {"model": model, "method": method, "seeds": len(runs)}
            for metric in METRICS:
                values = [row["points"][-1][metric] for row in runs]
                apart = [
                    value - exact[model, row["seed"]][metric] for value, row in zip(values, runs, strict=True)
                ]
                line[metric] = statistics.mean(values)
                line[f"{metric} minus synchronous"] = statistics.mean(apart)
                line[f"{metric} deviation"] = statistics.stdev(apart) if len(apart) > 1 else None
            found.append(line)
    return found


def main() -> None:
    args = options_of(
        __doc__, data="ml-100k", model=("fuxi",), seeds=3, epochs=8, lr=3e-3, png={"type": Path},
        methods={"default": METHODS, "help": f"of {', '.join(COLOURS)}"},
        optimizer={"default": "adam", "choices": ("adam", "adagrad", "rowwise_adagrad")},
    )  # fmt: skip
    methods = args.methods
    if "synchronous" not in methods or not {*methods} <= {*COLOURS}:
        raise SystemExit(f"--methods are synchronous and others of {', '.join(COLOURS)}, got {methods}")
    rows = []
    with RankPool([(RANKS, 1), (RANKS, RANKS)]) as pool:
        for model in args.model:
            for seed in range(1, args.seeds + 1):
                runs = {method: curve(pool, method, model, seed, args) for method in methods}
                own = runs["synchronous"]
                other = runs.get("nestpipe", own)
                assert torch.equal(own["rows"], other["rows"]) and own["points"] == other["points"], (
                    f"{model}, seed {seed}: nestpipe differs from synchronous training"
                )
                for method, run in runs.items():
                    rows.append({"model": model, "seed": seed, "method": method, "points": run["points"]})
                    last = ", ".join(f"{name} {value:.4f}" for name, value in run["points"][-1].items())
                    print(f"{model} seed {seed} {method:12} {last}", flush=True)
    found = {"summary": summary(rows), "rows": rows}
    record(args, **found)
    if args.png:
        draw(found, args.png)


if __name__ == "__main__":
    main()
