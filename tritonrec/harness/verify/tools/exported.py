"""Whether an export holds the state that its checkpoint was saved from: rows and scores; and its faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from ....data import Batch, ImpressionLoader, NextItemLoader
from ....embedding import HashTableCollection
from ....nn import GRM
from ....pipeline import Trainer, autocast, next_item_scores
from ....serving import Predictor, export
from ...job import Loader
from ...train.gather import whole_tables
from .. import kept_state
from ..faults import case, fault
from ..variants import POLICIES, SMALL, Run, Variant, add_variants

USERS = 16
"""Whose scores are compared."""
SCORES = "scores, exported"


def exported_parts(tables: Iterable[str], rank: int) -> list[str]:
    """What a rank compares of an export."""
    return [*(f"export of {name}" for name in tables), *[SCORES][rank:]]


def exported(run: Run) -> Iterator[Sequence[Batch]]:
    """As `exporting`; a fault's tool takes the place of `tritonrec.serving.export`."""
    return exporting(run, run.injected or export)


def exporting(run: Run, export: Callable[..., object] = export) -> Iterator[Sequence[Batch]]:
    """Save half way, and the changes at the end; export that, load it, and compare: collective.

    Every rank compares the weights of its own rows with those of the reference after the last step, rank 0
    scores of held-out users with those of the trainer's model in the precision of training.
    """
    trainer, steps, out = run.trainer, run.steps, Path(run.folder, "export")
    communicators, saved = trainer.program.communicators, Path(run.folder, "checkpoint")
    run.due += exported_parts(trainer.program.tables.table_names, communicators.rank)
    batches, half = [*run.batches], len(steps) // 2
    with trainer.saver(saved, full_every=2) as saver:
        yield batches[:half]
        saver.save(steps[half])
        yield batches[half:]
        saver.save(steps.stop)
    if communicators.rank == 0:
        export(saved, out, trainer.dense.evaluated)
    communicators.control.all_reduce(torch.zeros(1, dtype=torch.float32), "export")
    predictor = Predictor.load(out)
    for name, table in predictor.tables.items():
        run.comparison.compare_weights(steps[-1], run.expected(steps[-1]), name, table.ids, table.weights)
    whole = whole_tables(trainer.rows_of_ranks())
    if communicators.rank == 0:
        run.comparison.compare_part(steps[-1], SCORES, *scores_of(trainer, whole, predictor, run.loader))


def scores_of(
    trainer: Trainer, tables: HashTableCollection, predictor: Predictor, loader: Loader
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of the first held-out users: those of the trainer's model on the host, and the predictor's."""
    model, precision = deepcopy(trainer.dense.evaluated).cpu(), trainer.config.precision
    if isinstance(loader, ImpressionLoader):
        assert isinstance(model, GRM)
        batch = next(iter(loader.evaluation_batches(USERS)))
        with autocast(precision, torch.device("cpu")):
            want = model.predict(batch, tables.peek(batch.lookups()))
        return want, predictor.predict(batch)
    assert isinstance(loader, NextItemLoader)
    history = next(iter(loader.evaluation_batches(USERS))).history
    want = next_item_scores(model.eval(), tables, loader.catalogue, precision)(history)
    return want, predictor.scores(history, loader.catalogue)


add_variants(
    {
        "export": Variant(
            "rows and scores of an export of the last checkpoint, which holds changes since another",
            {**SMALL, "policy": POLICIES},
            shows=("rejected",),
            tool=exported,
        ),
        "export-bf16": Variant(
            "rows and scores of an export of a model trained in bfloat16",
            window={"precision": "bf16"},
            shows=("lookups",),
            tool=exported,
        ),
        "export-grm": Variant(
            "rows and probabilities of an export of GRM, merged",
            {"model": "grm", "batch_size": 12},
            {"merge": True},
            {"merge": False},
            shows=("lookups",),
            tool=exported,
        ),
    },
    before="stream-grm",
)


@fault(case(variant="export-bf16"), of="tool")
def export_in_another_precision(checkpoint: Any, out: Any, model: Any) -> None:
    """A model trained in bfloat16 is exported in float32."""
    export(checkpoint, out, model, precision="float32")


@fault(case(variant="export-grm"), of="tool")
def export_with_an_expert_less(checkpoint: Any, out: Any, model: Any) -> None:
    """An exported GRM mixes one expert less."""
    model = deepcopy(model)
    model.head.top_k -= 1
    export(checkpoint, out, model)


fault(
    case(variant="export", steps=8),
    name="export-of-a-stale-row",
    what="a row is exported from the step of an earlier checkpoint",
)(kept_state.stale_row_in_changes)
