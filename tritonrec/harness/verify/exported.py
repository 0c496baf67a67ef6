"""Whether an export holds the state that its checkpoint was saved from: rows and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ...data import Batch, ImpressionLoader, NextItemLoader
from ...embedding import HashTableCollection
from ...nn import GRM
from ...pipeline import Trainer, next_item_scores
from ...serving import Predictor
from ..job import Loader
from .state import Comparison

USERS = 16
"""Whose scores are compared."""


def exported_parts(tables: Iterable[str], rank: int) -> list[str]:
    """What a rank compares of an export."""
    return [*(f"export of {name}" for name in tables), *["scores"][rank:]]


def saved_between(
    trainer: Trainer, batches: Sequence[Batch], folder: str, step: int
) -> Iterator[Sequence[Batch]]:
    """`batches` in two halves, with a save between them and one at the end, which holds the changes."""
    half = len(batches) // 2
    with trainer.saver(Path(folder, "checkpoint"), full_every=2) as saver:
        yield batches[:half]
        saver.save(step + half)
        yield batches[half:]
        saver.save(step + len(batches))


def compare_export(
    trainer: Trainer,
    loader: Loader,
    comparison: Comparison,
    expected: Mapping[str, torch.Tensor],
    step: int,
    folder: str,
    export: Callable[..., object],
) -> None:
    """Export what `saved_between` saved, load it, and compare: collective.

    Every rank compares the weights of its own rows with those of the reference after `step`, rank 0 scores of
    held-out users with those of the trainer's model in the precision of training. `export` is
    `tritonrec.serving.export`, or breaks it.
    """
    communicators = trainer.program.communicators
    out = Path(folder, "export")
    if communicators.rank == 0:
        export(Path(folder, "checkpoint"), out, trainer.dense.evaluated)
    communicators.control.all_reduce(torch.zeros(1, dtype=torch.float32), "export")
    predictor = Predictor.load(out)
    for name, table in predictor.tables.items():
        comparison.compare_weights(step, expected, name, table.ids, table.weights)
    whole = trainer.whole_tables()
    if communicators.rank == 0:
        comparison.compare_scores(step, *scores_of(trainer, whole, predictor, loader))


def scores_of(
    trainer: Trainer, tables: HashTableCollection, predictor: Predictor, loader: Loader
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of the first held-out users: the trainer's, and the predictor's."""
    model, precision = trainer.dense.evaluated, trainer.config.precision
    if isinstance(loader, ImpressionLoader):
        assert isinstance(model, GRM)
        batch = next(iter(loader.evaluation_batches(USERS)))
        with trainer.autocast():
            want = model.predict(batch, tables.peek(batch.lookups()))
        return want, predictor.predict(batch)
    assert isinstance(loader, NextItemLoader)
    history = next(iter(loader.evaluation_batches(USERS))).history
    want = next_item_scores(model.eval(), tables, loader.catalogue, precision)(history)
    model.train()
    return want, predictor.scores(history, loader.catalogue)
