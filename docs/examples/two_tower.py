"""Two towers for retrieval, trained with in-batch negatives or with sampled ones, and ranked by HR@K.

    python docs/examples/two_tower.py                      # five losses beside each other, on MovieLens-100K
    torchrun --nproc-per-node 2 docs/examples/two_tower.py --micro-batches 16              # in the same bits
    python docs/examples/two_tower.py --data zipf:users=500,items=2000 --epochs 1 --only Popular

The user's tower reads an id, a bag of the last items and two dense values, the item's tower an id and a bag
of genres. Ranked is each user's last event against the whole catalogue without the items seen before.
"""

import argparse
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256

import numpy as np
import torch

from tritonrec import FeatureConfig, HashTableCollection, RowOptimizer, Trainer, WindowConfig, nn, ops
from tritonrec.data import Batch, KeyedJaggedTensor, Lookup, load_interactions, per_sample, per_token
from tritonrec.data.jagged import token_indices
from tritonrec.distributed import from_environment

DIM, HISTORY, NEGATIVES, TEMPERATURE = 32, 20, 16, 0.1
POOLING = {"user": "none", "history": "mean", "item": "none", "genre": "mean"}
FEATURES = [FeatureConfig(name, DIM, pooling=pooling) for name, pooling in POOLING.items()]


@dataclass(frozen=True)
class Events(Batch):
    """Per sample a user, the items before, and an item with any negatives behind it."""

    dense: torch.Tensor = field(metadata=per_sample(torch.float32, 2))  # (B, 2)
    log_q: torch.Tensor = field(metadata=per_token("item", dtype=torch.float32))  # of each item
    genres: KeyedJaggedTensor = field(metadata=per_token("item", dtype=None))  # a bag for each item

    def lookups(self):
        return {**super().lookups(), "genre": self.genres["genre"]}


class Log:
    """The events of a log by user and time; each but a user's first is a sample, the last one is for test."""

    def __init__(self, data):
        log = load_interactions(data)
        order = np.lexsort((log.timestamp, log.user))
        self.user, self.item = (torch.from_numpy(each[order]) for each in (log.user, log.item))
        self.genres, time = log.genres, torch.from_numpy(log.timestamp[order]).float()
        lengths = torch.from_numpy(np.unique(self.user, return_counts=True)[1])
        self.place = token_indices(torch.zeros_like(lengths), lengths)[0]  # in the user's history
        self.gap = torch.log1p((time - time.roll(1)).clamp(min=0)) / 10
        last = torch.ones(len(self.user), dtype=torch.bool)
        last[:-1] = self.user[1:] != self.user[:-1]
        self.train = ((self.place > 0) & ~last).nonzero()[:, 0]
        self.test = ((self.place > 0) & last).nonzero()[:, 0]
        self.catalogue, counts = self.item[self.train].unique(return_counts=True)
        self.log_q = torch.log(counts / counts.sum()).float()  # of a sample's item being one of them

    def batch(self, step, rows, negatives=0, popular=False):
        """The samples of some rows of the log; negatives are drawn from the catalogue, or from its events."""
        lengths = self.place[rows].clamp(max=HISTORY)
        before, offsets = token_indices(rows - lengths, lengths)
        items = self.item[rows].unsqueeze(1)
        if negatives:
            drawn_from = self.item[self.train] if popular else self.catalogue
            drawn = ops.random_indices(7, 1, step, rows, rows, negatives, len(drawn_from))
            items = torch.cat([items, drawn_from[drawn]], 1)
        features = {"user": Lookup(self.user[rows]), "history": Lookup(self.item[before], offsets)}
        features["item"] = Lookup(items.flatten(), torch.arange(len(rows) + 1) * items.shape[1])
        dense = torch.stack([torch.log1p(self.place[rows]) / 5, self.gap[rows]], 1)
        places = torch.searchsorted(self.catalogue, items.flatten()).clamp(max=len(self.catalogue) - 1)
        log_q, bags = self.log_q[places], self.bags(items.flatten())
        return Events(step, rows, KeyedJaggedTensor.from_dict(features), dense, log_q, bags)

    def bags(self, items):
        """The genres of items; of a log without any, what is left of the id by 19."""
        if self.genres is None:
            return KeyedJaggedTensor.from_dict({"genre": Lookup(items % 19, torch.arange(len(items) + 1))})
        starts, lengths = map(torch.from_numpy, self.genres.of(items.numpy()))
        places, offsets = token_indices(starts, lengths)
        genres = torch.from_numpy(self.genres.genres)[places]
        return KeyedJaggedTensor.from_dict({"genre": Lookup(genres, offsets)})


class Towers(torch.nn.Module):
    """Vectors of users and items of one length: their product is a cosine.

    Popular items are negatives more often; `corrected` makes up for it by log q.
    """

    def __init__(self, corrected, popular=False):
        super().__init__()
        self.corrected, self.popular = corrected, popular
        self.user, self.item = nn.MLP(2 * DIM + 2, 2 * DIM, DIM), nn.MLP(2 * DIM, 2 * DIM, DIM)
        self.norm = nn.RMSNorm(DIM, elementwise_affine=False)

    def users(self, batch, rows):
        return self.norm(self.user(torch.cat([rows["user"], rows["history"], batch.dense], 1)))

    def items(self, rows, offsets=None):
        return self.norm(self.item(torch.cat([rows["item"], rows["genre"]], 1), offsets))


class InBatch(Towers):
    """The items of all other samples of the global batch are a sample's negatives."""

    def forward(self, batch, rows, seed):
        ids = batch.lookups()["item"].ids
        return {"user": self.users(batch, rows), "item": self.items(rows), "id": ids, "log_q": batch.log_q}

    def window_loss(self, own, window, positions):
        log_q = window["log_q"] if self.corrected else None
        return nn.in_batch_softmax(
            own["user"], window["item"], positions, window["id"], log_q, DIM * TEMPERATURE
        )


class Sampled(Towers):
    """Negatives are drawn from the catalogue, all alike, or `popular`, from events, which need log q."""

    def forward(self, batch, rows, seed):
        # (1 + NEGATIVES) rows a sample
        items = self.items(rows, batch.features["item"].offsets).view(batch.num_samples, 1 + NEGATIVES, DIM)
        users, ids, temperature = self.users(batch, rows), batch.lookups()["item"].ids, DIM * TEMPERATURE
        if self.corrected:  # a column of 1 times one of -log q: a logit is <user, item> / temperature - log q
            users = torch.cat([users, users.new_ones(len(users), 1)], 1)
            items = torch.cat([items, -temperature * batch.log_q.view(*items.shape[:2], 1)], 2)
        ids = ids.view(items.shape[:2])
        return ops.sampled_softmax(users, items[:, 0], items[:, 1:], ids[:, 1:] != ids[:, :1], temperature)


KINDS = {
    "InBatch": partial(InBatch, True),
    "Uncorrected": partial(InBatch, False),
    "Sampled": partial(Sampled, False),
    "Popular": partial(Sampled, True, True),
    "PopularUncorrected": partial(Sampled, False, True),
}


def hit_rate(model, tables, log, k, most=1000):
    """HR@K of the users' last items."""
    rows, catalogue = log.test[:most], log.catalogue
    with torch.no_grad():
        users = log.batch(0, rows)
        found = model.eval().users(users, tables.peek(users.lookups()))
        nothing = Lookup(catalogue[:0], torch.zeros(len(catalogue) + 1, dtype=torch.int64))
        item = {"item": Lookup(catalogue), "genre": log.bags(catalogue)["genre"]}
        rows_of = tables.peek({**item, "user": Lookup(catalogue[:0]), "history": nothing})
        scores = ops.linear(found, model.items(rows_of), None)
    model.train()
    lengths = log.place[rows]
    seen = log.item[token_indices(rows - lengths, lengths)[0]]
    users = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    known = torch.isin(seen, catalogue)
    scores[users[known], torch.searchsorted(catalogue, seen[known])] = -torch.inf
    best = catalogue[scores.topk(min(k, len(catalogue)), 1).indices]
    return (best == log.item[rows].unsqueeze(1)).any(1).float().mean().item()


def train(kind, log, batch_size, epochs, ranks, micro_batches=4, mode="nestpipe", ks=(10, 50)):
    """HR@K by K of a model that is trained here, the last loss, and a digest of all parameters and rows."""
    torch.manual_seed(0)
    model = kind()
    tables = HashTableCollection(FEATURES, RowOptimizer("adam", lr=3e-3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    negatives, steps = NEGATIVES * isinstance(model, Sampled), len(log.train) // batch_size

    def batches():
        for step in range(epochs * steps):
            order = torch.randperm(len(log.train), generator=torch.Generator().manual_seed(step // steps))
            rows = log.train[order[step % steps * batch_size :][:batch_size]]
            yield log.batch(step, rows[ranks.rank :: ranks.world_size], negatives, model.popular)

    with Trainer(model, tables, optimizer, ranks, mode, WindowConfig(micro_batches)) as trainer:
        for result in trainer.run(batches()):
            last = result.loss
        tables = trainer.rows_of_ranks()
    values = [*model.state_dict().values(), *tables.peek(log.batch(0, log.train).lookups()).values()]
    digest = sha256(b"".join(each.numpy().tobytes() for each in values)).hexdigest()[:16]
    return {f"HR@{k}": hit_rate(model, tables, log, k) for k in ks}, last, digest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Two towers with in-batch and with sampled negatives.")
    parser.add_argument("--data", default="ml-100k")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    log = Log(options.data)
    with from_environment() as ranks:
        for name in options.only:
            given = log, options.batch_size, options.epochs, ranks, options.micro_batches
            metrics, loss, digest = train(KINDS[name], *given)
            if ranks.rank == 0:
                rates = " ".join(f"{metric} {value:.4f}" for metric, value in metrics.items())
                print(f"{name:18} {rates} loss {loss:.4f} digest {digest}", flush=True)
