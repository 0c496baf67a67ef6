"""A small model, its tables and its optimizer, for tests of what surrounds a training run."""

from copy import deepcopy
from functools import cache
from itertools import product
from threading import Lock

import torch
from speeds import slow_except

from tritonrec import nn
from tritonrec.data import NextItemLoader, load
from tritonrec.distributed import Communicators
from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer, TablePolicy
from tritonrec.harness.job import Job
from tritonrec.pipeline import MODES, DenseModel, Trainer, WindowConfig
from tritonrec.settings import with_values

DIM = 6
JOB = Job(
    "zipf:users=60,items=200,seed=1", batch_size=8, max_seq_len=9, num_negatives=1,
    sizes=nn.HSTUConfig(dim=DIM, layers=1, heads=2, qk_dim=3, v_dim=4, max_seq_len=9, dropout=0.2), lr=0.05,
)  # fmt: skip
"""An HSTU, where ranks have to build what they train."""
ONE_DRAWS = Lock()
"""Ranks that are threads share torch's generator: one at a time seeds it and draws its parameters."""
EVERY = slow_except(
    [("reference", "batch"), ("fwp", "window"), ("nestpipe", "batch")],
    [("reference", "batch"), *product(list(MODES)[1:], ("batch", "window"))],
)  # fmt: skip
"""Every mode at every consistency."""
EVERY_MODE = slow_except(["reference", "nestpipe"], MODES)
STAGED_MODES = slow_except(["sequential", "nestpipe"], list(MODES)[1:])
ONE_IN_FLIGHT = slow_except(
    [("reference", "batch"), ("sequential", "window")],
    [("reference", "batch"), *product(("sequential", "fwp"), ("batch", "window"))],
)
READS_AHEAD = slow_except(
    [("dbp", "window"), ("nestpipe", "batch")], product(("dbp", "nestpipe"), ("batch", "window"))
)


class Ranker(torch.nn.Module):
    """A loss per sample from one linear layer; `seen` has (step, samples) of each call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.mix = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.seen = []

    def hidden(self, batch, rows):
        return self.mix(self.norm(rows), batch.offsets)

    def forward(self, batch, rows, seed):
        self.seen.append((batch.step, batch.num_samples))
        rows, tokens = rows["item"], batch.num_tokens
        hidden = self.hidden(batch, rows[:tokens])
        score = (hidden * rows[tokens : 2 * tokens]).sum(1)
        nn.record(score=score)
        return nn.sum_by_sample(1 - torch.tanh(score), batch.offsets)


class NoParameters(torch.nn.Module):
    """A loss per sample from the rows alone."""

    def forward(self, batch, rows, seed):
        rows, tokens = rows["item"], batch.num_tokens
        score = (rows[:tokens] * rows[tokens : 2 * tokens]).sum(1)
        return nn.sum_by_sample(1 - torch.tanh(score), batch.offsets)


def parts(
    model=Ranker, optimizer="adam", lr=0.05, policy=None, rule=None,
    placement=None, names=("item",), seed=2, dim=DIM,
):  # fmt: skip
    rule = rule or RowOptimizer(optimizer, lr=lr)
    with ONE_DRAWS:
        model = model()
    features = [FeatureConfig(name, dim, policy=policy or TablePolicy()) for name in names]
    tables = HashTableCollection(features, rule, seed=seed, slots=8, chunk_rows=32, placement=placement)
    return model, tables, optimizer_of(model, optimizer, lr)


def optimizer_of(model, name="adam", lr=0.05):
    """torch's optimizer of this name, None for a model without parameters."""
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "rowwise_adagrad": torch.optim.Adagrad}[name]
    parameters = list(model.parameters())
    return kind(parameters, lr=lr) if parameters else None


def trainer(made, mode="nestpipe", consistency="batch", communicators=None, trust_model=False, **window):
    window.setdefault("micro_batches", 1 if mode == "reference" else 3)
    config = with_values(WindowConfig(consistency=consistency, seed=4), window)
    return Trainer(*made, communicators or Communicators.local(), mode, config, trust_model=trust_model)


def adam_trainer(model, features, lr=0.05, mode="nestpipe", config=None, seed=0, **recipe):
    """A trainer of one rank, whose rows and parameters Adam updates."""
    tables = HashTableCollection(features, RowOptimizer("adam", lr=lr), seed=seed)
    return Trainer(model, tables, optimizer_of(model, lr=lr), Communicators.local(), mode, config, **recipe)


def batches(count=6, size=7, rank=0, world_size=1):
    """Copies: some models of the tests edit theirs."""
    return [deepcopy(_batch(step, size, rank, world_size)) for step in range(count)]


@cache
def _batch(step, size, rank, world_size):
    loader = NextItemLoader(load("zipf:users=60,items=80,seed=1"), size, 9, 1, 3, rank, world_size)
    return loader.batch(step)


def state(made):
    model, tables, optimizer = made
    exported = [part for pair in tables.export().values() for part in pair]
    return [
        *exported,
        *(each.clone() for each in DenseModel(model, optimizer).tensors().values()),
    ]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def trained(made, mode, consistency, run_batches, **window):
    """State and results after training on `run_batches`."""
    with trainer(made, mode, consistency, **window) as training:
        results = list(training.run(run_batches))
    return state(made), results


def of_rank(communicators, window, mode="nestpipe", steps=3, job=JOB, optimizer="adam", change=None):
    """Loss, scale, skipped and norm of each step, the dense tensors, rows and counts of one of several ranks.

    `change` edits the model, and knows the ranks.
    """
    made = job.build(optimizer)
    if change is not None:
        change(made[0], communicators)
    loader = job.loader(communicators.rank, communicators.world_size)
    with Trainer(*made, communicators, mode, window) as training:
        results = list(training.run(loader.batch(step) for step in range(steps)))
        dense = [each.clone() for each in training.dense.tensors().values()]
    ends = [(each.loss, each.loss_scale, each.skipped, each.grad_norm) for each in results]
    return ends, dense, made[1].export()["item"], training.counts


def assert_part_of(found, whole):
    """What a rank returns has the bits of what one process does, and of its rows those of the rank."""
    (ends, dense, (own_ids, own_rows), _), (expected, weights, (ids, rows), _) = found, whole
    assert repr(ends) == repr(expected) and same(dense, weights)  # of a nan, too
    places = torch.searchsorted(ids, own_ids)
    assert torch.equal(ids[places], own_ids) and torch.equal(rows[places], own_rows)
