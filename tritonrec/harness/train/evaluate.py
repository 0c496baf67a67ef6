"""How good a trained model is: ranking of the next item, group AUC of impressions, or AUC of clicks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...data import Split, evaluate, evaluate_clicks, evaluate_impressions, popularity_scores
from ...data.ctr import ClickSamples
from ...data.impressions import ImpressionSamples
from ...data.loader import NextItems
from ...data.splits import NO_PART, Part
from ...nn import DLRM, GRM, NextItemModel
from ...pipeline import Precision, RowsOfRanks, autocast, rank_held_out
from ..job import Epochs

if TYPE_CHECKING:
    from ...serving import Predictor

KS = (10, 50)

COUNTED_STEPS = 256
"""Batches whose impressions are in memory at once for the baseline."""
COUNTED_SCORES = 2**21
"""Scores of it that are in memory at once."""

Metrics = dict[str, float]


def metric_names(loader: Epochs) -> list[str]:
    """Of what `evaluate_model` gives."""
    if isinstance(loader, ClickSamples):
        return ["AUC", "accuracy", "BCE"]
    if isinstance(loader, ImpressionSamples):
        return [f"{kind}/{task}" for task in loader.tasks for kind in ("GAUC", "AUC")]
    return [f"{kind}@{k}" for k in KS for kind in ("HR", "NDCG")]


def check_held_out(loader: Epochs, split: Split) -> None:
    """Raise ValueError where nothing is held out for a part of the split, before a run is spent on it."""
    parts: list[Part] = ["test", "validation"] if split.has_validation else ["test"]
    for part in parts:
        try:
            empty = next(iter(loader.evaluation_batches(part=part)), None) is None
        except ValueError as error:
            raise ValueError(f"{error} (--split {split})") from error
        if empty:
            raise ValueError(f"no event is held out for {part}: {NO_PART} (--split {split})")


def evaluate_model(
    model: torch.nn.Module,
    rows: RowsOfRanks,
    loader: Epochs,
    precision: Precision = "float32",
    part: Part = "test",
) -> Metrics:
    """Metrics of the samples of a part that the loader holds out. Collective over the ranks of the `rows`.

    The model computes in `precision`; rankings are of float32 scores, which few items share.

    HR@K and NDCG@K of a full ranking for next-item models, group AUC of each task for GRM; AUC, accuracy and
    cross entropy for DLRM.
    """
    device = next((each.device for each in model.parameters()), torch.device("cpu"))

    def predicted(batch: Any) -> torch.Tensor:
        assert isinstance(model, (DLRM, GRM))
        batch = batch.to(device)
        with autocast(precision, device):
            return model.predict(batch, rows.peek(batch.lookups())).to(torch.float32)

    if isinstance(loader, ClickSamples):
        return evaluate_clicks(predicted, loader, part, rows.scored)
    if isinstance(loader, ImpressionSamples):
        return evaluate_impressions(predicted, loader, part=part, scored=rows.scored)
    assert isinstance(model, NextItemModel)
    return rank_held_out(model, rows, loader, KS, precision, part)


def evaluate_export(predictor: Predictor, loader: Epochs) -> Metrics:
    """`evaluate_model` of an exported model."""
    if isinstance(loader, ClickSamples):
        return evaluate_clicks(predictor.predict, loader)
    if isinstance(loader, ImpressionSamples):
        return evaluate_impressions(predictor.predict, loader)
    return evaluate(lambda history: predictor.scores(history, loader.catalogue), loader, KS)


def baseline(loader: Epochs) -> Metrics:
    """The same metrics of what takes no training: an item's popularity, its rate in each task, or one rate of
    clicks for all.
    """
    if isinstance(loader, ClickSamples):
        rate_of_clicks = torch.tensor(loader.click_rate, dtype=torch.float32)
        return evaluate_clicks(lambda batch: rate_of_clicks.expand(batch.num_samples), loader)
    if isinstance(loader, NextItems):
        few = max(1, min(256, COUNTED_SCORES // max(loader.num_items, 1)))  # they take a moment and no model
        return evaluate(popularity_scores(loader), loader, KS, batch_size=few)
    known, counts = (
        torch.empty(0, dtype=torch.int64),
        torch.zeros(0, 1 + len(loader.tasks), dtype=torch.double),
    )
    for first in range(0, loader.steps_per_epoch, COUNTED_STEPS):
        steps = range(first, min(first + COUNTED_STEPS, loader.steps_per_epoch))
        batches = [loader.global_batch(step) for step in steps]
        items = torch.cat([known, *(batch.exposed_items for batch in batches)])
        labels = torch.cat([batch.labels for batch in batches]).double()
        terms = torch.cat([counts, torch.cat([torch.ones(len(labels), 1, dtype=torch.double), labels], 1)])
        known, inverse = items.unique(return_inverse=True)
        counts = torch.zeros(len(known), terms.shape[1], dtype=torch.double).index_add_(0, inverse, terms)
    seen, hits = counts[:, 0], counts[:, 1:]
    mean = hits.sum(0) / seen.sum()
    rates = (hits + 5 * mean) / (seen[:, None] + 5)  # as if each item had been shown five times more

    def rate(batch) -> torch.Tensor:
        places = torch.searchsorted(known, batch.exposed_items).clamp(max=len(known) - 1)
        found = known[places] == batch.exposed_items
        return torch.where(found[:, None], rates[places], mean)

    return evaluate_impressions(rate, loader)
