"""How good a next-item model is: a full ranking of every user's held-out item, as the model was trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import ops
from ..data import JaggedBatch, Lookup, NextItemLoader, NextItemStream, evaluate
from ..data.splits import Part
from ..embedding import HashTableCollection
from .precision import Precision, autocast


def rank_held_out(
    model: Any,
    tables: HashTableCollection,
    loader: NextItemLoader | NextItemStream,
    ks: Sequence[int] = (10,),
    precision: Precision = "float32",
    part: Part = "test",
    exclude_seen: bool = True,
) -> dict[str, float]:
    """``{"HR@10": ..., "NDCG@10": ...}`` of a full ranking of the held-out items of a part (`data.evaluate`).

    Args:
        model: ``encode(history, rows)`` gives hidden states (L, D) of a `JaggedBatch`, from the rows (L, D)
            of its items. It is in evaluation mode meanwhile.
        tables: hold every rank's rows of the feature ``item``. precision: of the model's arithmetic; scores
            are float32, of which few are equal.
    """
    training = model.training
    model.eval()
    try:
        return evaluate(
            next_item_scores(model, tables, loader.catalogue, precision),
            loader,
            ks,
            part=part,
            exclude_seen=exclude_seen,
        )
    finally:
        model.train(training)


def next_item_scores(
    model: Any, tables: HashTableCollection, catalogue: torch.Tensor, precision: Precision = "float32"
) -> Callable[[JaggedBatch], torch.Tensor]:
    """The scores (B, I) float32 of items (I,) for each history, of a model as `rank_held_out` takes it.

    They are on the model's device.
    """
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    items = tables.peek({"item": Lookup(catalogue.to(device))})["item"]

    def scores(history: JaggedBatch) -> torch.Tensor:
        history = history.to(device)
        rows = tables.peek({"item": Lookup(history.ids)})["item"]
        with torch.no_grad(), autocast(precision, device):
            hidden = model.encode(history, rows).to(torch.float32)
        # the last token of each sequence stands for the user; the linear op scores each user alone
        return ops.linear(hidden[history.offsets[1:] - 1], items, None)

    return scores
