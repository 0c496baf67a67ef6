"""Two tasks and one model: MMoE beside a shared bottom and models of one task, on ratings of films.

    python docs/examples/multi_task.py
    python docs/examples/multi_task.py --data zipf:users=300,items=200,ratings=1 --epochs 1

The tasks are a rating of at least 4 and one of 5. A shared bottom is an MMoE of one expert: its gates have
nothing to choose.
"""

import argparse
from dataclasses import dataclass, field

import torch

from tritonrec import (
    Communicators,
    FeatureConfig,
    HashTableCollection,
    RowOptimizer,
    Trainer,
    WindowConfig,
    nn,
)
from tritonrec.data import Batch, KeyedJaggedTensor, auc, clicks_from_ratings, load_interactions, per_sample

DIM, BATCH, LR, TASKS = 16, 512, 3e-3, {"liked": 4.0, "loved": 5.0}


@dataclass(frozen=True)
class Ratings(Batch):
    """Per sample an id of each feature, dense values, and the label of each task."""

    dense: torch.Tensor = field(metadata=per_sample(torch.float32, 2))  # (B, F)
    labels: torch.Tensor = field(metadata=per_sample(dim=2))  # (B, T) int64, 0 or 1


class Log:
    """The ratings with a label of each task; the last tenth of each user's is for test."""

    def __init__(self, data):
        ratings = load_interactions(data)
        logs = [clicks_from_ratings(ratings, least) for least in TASKS.values()]  # the same rows in one order
        self.features, self.trained = logs[0].features, logs[0].trained
        self.dense, self.ids = torch.from_numpy(logs[0].dense), torch.from_numpy(logs[0].categories)
        self.labels = torch.stack([torch.from_numpy(log.labels) for log in logs], 1)
        self.tables = [FeatureConfig(name, DIM) for name in self.features]

    def batch(self, step, rows):
        features = KeyedJaggedTensor.from_matrix(self.features, self.ids[rows])
        return Ratings(step, rows, features, self.dense[rows], self.labels[rows])


class MultiTask(torch.nn.Module):
    """A layer over the rows of all features, then the experts, gates and towers of `nn.MMoE`.

    `tasks` are the columns that are learned: both, or one.
    """

    def __init__(self, log, experts, tasks=(0, 1)):
        super().__init__()
        self.tasks = list(tasks)
        self.bottom = nn.MLP(len(log.features) * DIM + log.dense.shape[1], 2 * DIM, 2 * DIM)
        self.head = nn.MMoE(2 * DIM, len(self.tasks), experts, top_k=min(2, experts))

    def logits(self, batch, rows):  # (B, T)
        x = self.bottom(torch.cat([*rows.values(), batch.dense], 1))
        return self.head(x, torch.arange(len(x) + 1))  # a row is a sample

    def forward(self, batch, rows, seed):
        return nn.binary_cross_entropy(self.logits(batch, rows), batch.labels[:, self.tasks])


def train(model, log, epochs, mode="nestpipe", micro_batches=4):
    """The test's AUC of each task that the model has learned."""
    tables = HashTableCollection(log.tables, RowOptimizer("adam", LR))
    optimizer = torch.optim.Adam(model.parameters(), LR, fused=True)
    steps = log.trained // BATCH

    def batches():
        for step in range(epochs * steps):
            order = torch.randperm(log.trained, generator=torch.Generator().manual_seed(step // steps))
            yield log.batch(step, order[step % steps * BATCH :][:BATCH])

    ranks, window = Communicators.local(), WindowConfig(micro_batches)
    with Trainer(model, tables, optimizer, ranks, mode, window) as trainer:
        for _ in trainer.run(batches()):
            pass
        test = log.batch(0, torch.arange(log.trained, len(log.labels)))
        with torch.no_grad():
            logits = model.eval().logits(test, trainer.rows_of_ranks().peek(test.lookups()))
    names = [list(TASKS)[task] for task in model.tasks]
    return {
        name: auc(*each) for name, *each in zip(names, logits.T, test.labels[:, model.tasks].T, strict=True)
    }


KINDS = {
    "MMoE, 4 experts": lambda log: MultiTask(log, 4),
    "shared bottom": lambda log: MultiTask(log, 1),
    **{f"{name} alone": lambda log, task=task: MultiTask(log, 1, [task]) for task, name in enumerate(TASKS)},
}


def main(data, epochs):
    log = Log(data)
    for name, make in KINDS.items():
        torch.manual_seed(0)
        found = train(make(log), log, epochs)
        print(f"{name:16}", *(f"{task} {value:.4f}" for task, value in found.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="MMoE for two tasks.")
    parser.add_argument("--data", default="ml-100k")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    main(options.data, options.epochs)
