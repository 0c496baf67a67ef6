"""A small training that publishes, and what its replicas are compared with."""

from __future__ import annotations

import shutil
import time
from unittest.mock import patch

import pytest
import torch

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer
from tritonrec.data import NextItemLoader, load
from tritonrec.embedding import Eviction, TablePolicy
from tritonrec.nn import HSTU, HSTUConfig
from tritonrec.pipeline import WindowConfig
from tritonrec.serving import Predictor, export
from tritonrec.serving.live import (
    Publisher,
)
from tritonrec.serving.live import publisher as publisher_module

LONGEST, DIM = 6, 6
SIZES = {"dim": DIM, "layers": 1, "heads": 2, "qk_dim": 3, "v_dim": 4, "max_seq_len": LONGEST}


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    """Tracing takes seconds, and each snapshot sets all values of the program."""
    programs, trace = {}, publisher_module.save_program

    def traced(scorer, path):
        key = scorer.kind, scorer.precision
        if key not in programs:
            programs[key] = trace(scorer, path)
        return programs[key]

    with patch.object(publisher_module, "save_program", traced):
        yield


class Training:
    """A small HSTU, its trainer and a loader."""

    def __init__(self, mode="nestpipe", precision="float32", seed=2, communicators=None):
        torch.manual_seed(seed)
        self.model = HSTU(HSTUConfig(**SIZES))
        policy = TablePolicy(Eviction("lru", capacity=30))
        feature = FeatureConfig("item", DIM, policy=policy)
        self.tables = HashTableCollection([feature], RowOptimizer("adam", lr=0.05), seed=2, slots=8)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        communicators = communicators or Communicators.local()
        rank, ranks = communicators.rank, communicators.world_size
        config = WindowConfig(micro_batches=2, precision=precision)
        self.trainer = Trainer(self.model, self.tables, optimizer, communicators, mode, config)
        self.loader = NextItemLoader(load("zipf:users=60,items=90,seed=1"), 4, LONGEST, 1, 3, rank, ranks)

    def batches(self, first, last):
        return (self.loader.batch(step) for step in range(first, last))

    def run(self, publisher, steps):
        for _ in publisher.run(self.batches(self.trainer.next_step, self.trainer.next_step + steps)):
            pass

    def exported(self, folder):
        """The trainer's state, by way of a checkpoint."""
        shutil.rmtree(folder, ignore_errors=True)
        self.trainer.save(folder / "checkpoint")
        export(folder / "checkpoint", folder / "export", self.model)
        return Predictor.load(folder / "export")

    def close(self):
        self.trainer.close()


def state_of(trainer):
    """A trainer's ids, weights and dense values."""
    tables = {name: (ids, weights) for name, (ids, weights) in trainer.tables.weights().items()}
    return tables, {
        name: each.detach().clone() for name, each in trainer.dense.evaluated.state_dict().items()
    }


def assert_has(predictor, state):
    """In every bit."""
    tables, dense = state
    for name, (ids, weights) in tables.items():
        table = predictor.tables[name]
        assert torch.equal(table.ids, ids) and torch.equal(table.weights, weights), name
    values = {
        name.removeprefix("module.model."): each for name, each in predictor.program.state_dict().items()
    }
    assert values.keys() == dense.keys()
    for name, value in dense.items():
        assert torch.equal(values[name], value), name


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


def settled(publisher):
    """Wait for what is under way."""
    until(lambda: all(each.done() for each in publisher._under_way) and not publisher._is_busy())


def opened(training, place, **options):
    return Publisher(
        training.trainer, place, **{"every": 2, "snapshot_every": 100, "patience": 20.0, **options}
    )


def places(value, path=()):
    """Paths of all values in a document, of itself first."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in parts:
        yield from places(each, (*path, key))
