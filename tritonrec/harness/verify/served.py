"""Whether inference with a bounded lag predicts what the trainer's own model does, whatever the bound."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch

from ...data import ClickBatch, ClickLoader, Lookup
from ...embedding import HashTableCollection
from ...nn import DLRM, partition_tables
from ...pipeline import Trainer
from ...serving import TableWiseDLRM, infer, own_samples
from ...serving.bounded_lag import BoundedLagAllToAll
from ..job import Loader
from .state import Comparison

BOUNDS = (0, 1, 3)
SERVED_PARTS = [f"predictions, served with k = {bound}" for bound in BOUNDS]
"""What every rank compares."""
BATCHES = 9
"""More than 2 (k + 1), so that every slot of a window is used again."""


def compare_served(
    trainer: Trainer,
    loader: Loader,
    comparison: Comparison,
    step: int,
    exchange: Callable[..., BoundedLagAllToAll],
) -> int:
    """Serve batches with each of `BOUNDS`, table by table on its rank, and compare: collective.

    Every rank compares the predictions for its own samples with those of the trainer's model on the host,
    which looks up all rows in one process. `exchange` is `BoundedLagAllToAll`, or breaks it. Returns how many
    predictions were compared.
    """
    communicators, model = trainer.program.communicators, deepcopy(trainer.dense.evaluated).cpu()
    assert isinstance(loader, ClickLoader) and isinstance(model, DLRM)
    rank, world = communicators.rank, communicators.world_size
    whole, features = trainer.whole_tables(), model.config.features
    served = TableWiseDLRM(
        model, partition_tables(dict.fromkeys(features, 1), world),
        {name: _rows(whole, name) for name in features}, rank, world,
    )  # fmt: skip
    batches = [loader.global_batch(at) for at in range(BATCHES)]
    want = [_predicted(model, whole, batch)[own_samples(len(batch.labels), rank, world)] for batch in batches]
    size = served.capacity(max(len(batch.labels) for batch in batches))
    for bound in BOUNDS:
        lagging = exchange(communicators.control.group, bound, size)
        with torch.no_grad():
            got = torch.cat([*infer(served, batches, lagging)])
        comparison.compare_predictions(step, bound, torch.cat(want), got)
    return len(BOUNDS) * sum(map(len, want))


def _predicted(model: DLRM, tables: HashTableCollection, batch: ClickBatch) -> torch.Tensor:
    """Probabilities (B,) of a click."""
    return model.predict(batch, tables.peek(batch.lookups()))


def _rows(tables: HashTableCollection, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The table of one feature, as `TableWiseDLRM` takes it."""

    def rows(ids: torch.Tensor) -> torch.Tensor:
        return tables.peek({each: Lookup(ids if each == name else ids[:0]) for each in tables.features})[name]

    return rows
