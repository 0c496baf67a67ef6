"""Whether inference with a bounded lag predicts what the trainer's own model does, whatever the bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from datetime import timedelta

import torch

from ....data import Batch, ClickBatch, ClickLoader, Lookup
from ....embedding import HashTableCollection
from ....nn import DLRM, partition_tables
from ....serving import TableWiseDLRM, infer, own_samples
from ....serving.bounded_lag import BoundedLagAllToAll, Exchange
from ...train.gather import whole_tables
from ..faults import case, fault
from ..variants import CRITEO, Run, Variant, add_variants

BOUNDS = (0, 1, 3)
PARTS = [f"predictions, served with k = {bound}" for bound in BOUNDS]
"""What every rank compares."""
BATCHES = 9
"""More than 2 (k + 1), so that every slot of a window is used again."""


def served(run: Run) -> Iterator[Iterable[Batch]]:
    """Serve batches with each of `BOUNDS`, table by table on its rank, and compare: collective.

    Every rank compares the predictions for its own samples with those of the trainer's model on the host,
    which looks up all rows in one process. A fault's tool takes the place of `BoundedLagAllToAll`.
    """
    run.due += PARTS
    yield run.batches
    trainer, loader, exchange = run.trainer, run.loader, run.injected or BoundedLagAllToAll
    communicators, model = trainer.program.communicators, deepcopy(trainer.dense.evaluated).cpu()
    assert isinstance(loader, ClickLoader) and isinstance(model, DLRM)
    rank, world = communicators.rank, communicators.world_size
    whole, features = whole_tables(trainer.rows_of_ranks()), model.config.features
    served = TableWiseDLRM(
        model, partition_tables(dict.fromkeys(features, 1), world),
        {name: _rows(whole, name) for name in features}, rank, world,
    )  # fmt: skip
    batches = [loader.global_batch(at) for at in range(BATCHES)]
    want = [_predicted(model, whole, batch)[own_samples(len(batch.labels), rank, world)] for batch in batches]
    size = served.capacity(max(len(batch.labels) for batch in batches))
    for bound, part in zip(BOUNDS, PARTS, strict=True):
        lagging = exchange(communicators.control.group, bound, size)
        with torch.no_grad():
            got = torch.cat([*infer(served, batches, lagging)])
        run.comparison.compare_part(run.steps[-1], part, torch.cat(want), got)
        run.counts["served"] += len(got)


def _predicted(model: DLRM, tables: HashTableCollection, batch: ClickBatch) -> torch.Tensor:
    """Probabilities (B,) of a click."""
    return model.predict(batch, tables.peek(batch.lookups()))


def _rows(tables: HashTableCollection, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The table of one feature, as `TableWiseDLRM` takes it."""

    def rows(ids: torch.Tensor) -> torch.Tensor:
        return tables.peek({each: Lookup(ids if each == name else ids[:0]) for each in tables.features})[name]

    return rows


add_variants(
    {
        "bounded-lag": Variant(
            "the trained DLRM is served with every bound k of the lag",
            {"model": "dlrm", "batch_size": 9, "data": CRITEO},
            shows=("served",),
            tool=served,
        ),
    },
    before="balanced",
)


@fault(case(variant="bounded-lag"), of="tool")
class OneBufferForAllLags(BoundedLagAllToAll):
    """All exchanges in flight arrive in one buffer, and a batch is served with the rows of the newest."""

    def finish_through(self, exchange: Exchange, timeout: timedelta | None = None) -> None:
        arrived = [] if exchange.done else [*self._in_flight]
        for each in arrived:
            super().finish_through(each, timeout)
        for each in arrived:
            each.values = arrived[-1].values
