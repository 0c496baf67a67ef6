"""How good a trained model is: ranking of the next item, group AUC of impressions, or AUC of clicks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import ops
from ...data import (
    ClickLoader,
    ImpressionLoader,
    JaggedBatch,
    Lookup,
    NextItemLoader,
    evaluate,
    evaluate_clicks,
    evaluate_impressions,
    popularity_scores,
)  # fmt: skip
from ...embedding import HashTableCollection
from ...nn import DLRM, GRM, NextItemModel
from ..job import Epochs

KS = (10, 50)

LESS_IS_BETTER = ("BCE",)

Metrics = dict[str, float]


def metric_names(loader: Epochs) -> list[str]:
    """Of what `evaluate_model` gives."""
    if isinstance(loader, ClickLoader):
        return ["AUC", "accuracy", "BCE"]
    if isinstance(loader, ImpressionLoader):
        return [f"{kind}/{task}" for task in loader.tasks for kind in ("GAUC", "AUC")]
    return [f"{kind}@{k}" for k in KS for kind in ("HR", "NDCG")]


def evaluate_model(model: torch.nn.Module, tables: HashTableCollection, loader: Epochs) -> Metrics:
    """Metrics of the held-out samples of the loader; `tables` hold every rank's rows.

    HR@K and NDCG@K of a full ranking for next-item models, group AUC of each task for GRM; AUC, accuracy and
    cross entropy for DLRM.
    """
    if isinstance(loader, ClickLoader):
        assert isinstance(model, DLRM)
        return evaluate_clicks(lambda batch: model.predict(batch, tables.peek(batch.lookups())), loader)
    if isinstance(loader, ImpressionLoader):
        assert isinstance(model, GRM)
        return evaluate_impressions(lambda batch: model.predict(batch, tables.peek(batch.lookups())), loader)
    assert isinstance(model, NextItemModel)
    model.eval()
    metrics = evaluate(next_item_scores(model, tables, loader.catalogue), loader, KS)
    model.train()
    return metrics


def next_item_scores(
    model: torch.nn.Module, tables: HashTableCollection, catalogue: torch.Tensor
) -> Callable[[JaggedBatch], torch.Tensor]:
    """The scores (B, I) of items (I,) for each history, of a model in evaluation mode."""
    items = tables.peek({"item": Lookup(catalogue)})["item"]

    def scores(history: JaggedBatch) -> torch.Tensor:
        rows = tables.peek({"item": Lookup(history.ids)})["item"]
        with torch.no_grad():
            hidden = model.encode(history, rows)  # type: ignore[operator]
        # The last token of each sequence stands for the user; the linear op keeps a user's scores his own.
        return ops.linear(hidden[history.offsets[1:] - 1], items, None)

    return scores


def baseline(loader: Epochs) -> Metrics:
    """The same metrics of what takes no training: an item's popularity, its rate in each task, or one rate of
    clicks for all.
    """
    if isinstance(loader, ClickLoader):
        rate_of_clicks = torch.tensor(loader.log.labels[: loader.log.trained].mean(), dtype=torch.float32)
        return evaluate_clicks(lambda batch: rate_of_clicks.expand(batch.num_samples), loader)
    if isinstance(loader, NextItemLoader):
        return evaluate(popularity_scores(loader), loader, KS)
    batches = [loader.global_batch(step) for step in range(loader.steps_per_epoch)]
    items = torch.cat([batch.exposed_items for batch in batches])
    labels = torch.cat([batch.labels for batch in batches]).double()
    known, inverse = items.unique(return_inverse=True)
    seen = torch.bincount(inverse, minlength=len(known)).double()
    hits = torch.zeros(len(known), labels.shape[1], dtype=torch.double).index_add_(0, inverse, labels)
    mean = labels.mean(0)
    rates = (hits + 5 * mean) / (seen[:, None] + 5)  # as if each item had been shown five times more

    def rate(batch) -> torch.Tensor:
        places = torch.searchsorted(known, batch.exposed_items).clamp(max=len(known) - 1)
        found = known[places] == batch.exposed_items
        return torch.where(found[:, None], rates[places], mean)

    return evaluate_impressions(rate, loader)
