"""Classification of stale rows and dropped inputs (Slipstream, sections III.C and III.D).

A row is stale if its last change is below T. By equation 1 a change of exactly T is stale too; here it is
not, so T = 0 drops nothing, and is exact. The change of a row that was not trained between the last two
snapshots is unknown, and the row is not stale.

An input is hot if all its rows are hot. A hot input is dropped if at least alpha of its rows are stale, that
is if the alpha-th smallest change of its rows is below T. Other inputs are never dropped.

Dimensions: S inputs, C features, H hot rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..ops import random_indices
from .rows import HotRows
from .threshold import Interval, Threshold, find_threshold, interval

BLOCK = 65536
"""Inputs that are processed together."""
SAMPLE_STREAM = 0x736C6970
LEAST_SAMPLE = 1000
"""Least size of the sample, if there are so many inputs."""


@dataclass(frozen=True)
class Judgement:
    """How much each hot row changed between the last two snapshots; the same on every rank.

    `changes` is (H,) float32, the Euclidean distances, infinite where a row was not trained in between.
    """

    hot: HotRows
    changes: torch.Tensor

    @property
    def judged(self) -> int:
        """Rows with a known change."""
        return int(self.changes.isfinite().sum())

    def stale(self, threshold: float) -> torch.Tensor:
        """(H,) bool: the rows whose change is below the threshold."""
        return self.changes.double() < threshold

    def changes_of(self, categories: torch.Tensor, alpha: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether inputs are hot, (S,) bool, and their alpha-th smallest changes (S,); infinite if not hot.

        Args:
            categories: (S, C) int64, ids of the inputs. alpha: in [1, C].
        """
        if not 1 <= alpha <= categories.shape[1]:
            raise ValueError(f"alpha must be in [1, {categories.shape[1]}], the features, got {alpha}")
        hot, changes = [], []
        for part in categories.split(BLOCK):
            places = self.hot.places(part)
            here = (places >= 0).all(1)
            known = torch.full(places.shape, math.inf, dtype=torch.float32, device="cpu")
            known[here] = self.changes[places[here]]
            hot.append(here)
            changes.append(known.sort(1).values[:, alpha - 1])
        return torch.cat(hot), torch.cat(changes)


@dataclass(frozen=True)
class Classification:
    """Classification of S inputs: `kept` (S,) bool, and its figures."""

    kept: torch.Tensor
    hot_inputs: int
    sampled: int
    alpha: int
    threshold: Threshold
    stale_rows: int

    @property
    def dropped(self) -> int:
        """Inputs dropped from further training."""
        return int((~self.kept).sum())

    @property
    def dropped_share(self) -> float:
        """Share of the hot inputs, which the interval estimates."""
        return self.dropped / max(self.hot_inputs, 1)

    def as_json(self) -> dict[str, Any]:
        return {
            "inputs": len(self.kept),
            "hot_inputs": self.hot_inputs,
            "sampled": self.sampled,
            "alpha": self.alpha,
            "threshold": self.threshold.value,
            "interval": list(self.threshold.interval),
            "probes": len(self.threshold.probes),
            "stale_rows": self.stale_rows,
            "dropped": self.dropped,
            "dropped_share_of_hot": self.dropped_share,
        }


def classify(
    judgement: Judgement,
    categories: torch.Tensor,
    *,
    drop: float,
    threshold: float | None,
    alpha: int,
    sample: float,
    confidence: float,
    seed: int,
) -> Classification:
    """Classify inputs that look up `categories` (S, C) int64.

    Args:
        drop: largest share of the hot inputs to drop, for which a threshold is found on a sample.
        threshold: T, instead of `drop`.
        alpha: least number of stale rows of a dropped input.
        sample: share of the hot inputs to sample, at least `LEAST_SAMPLE` inputs.
        confidence: of dropping at most `drop`. seed: of the sample.
    """
    hot, changes = judgement.changes_of(categories, alpha)
    inputs = hot.nonzero().squeeze(1)
    size = min(len(inputs), max(math.ceil(sample * len(inputs)), LEAST_SAMPLE))
    words = random_indices(
        seed, SAMPLE_STREAM, 0, inputs, torch.zeros_like(inputs), count=1, upper=2**32
    )  # fmt: skip
    sampled = changes[inputs[torch.argsort(words[:, 0], stable=True)[:size]]]
    if threshold is None:
        found = find_threshold(sampled, len(inputs), drop, confidence)
    else:
        estimate = Interval(0.0, 0.0, 0.0)
        if size:
            estimate = interval(int((sampled.double() < threshold).sum()), size, len(inputs), confidence)
        found = Threshold(threshold, estimate, [])
    kept = ~(hot & (changes.double() < found.value))
    stale_rows = int(judgement.stale(found.value).sum())
    return Classification(kept, len(inputs), size, alpha, found, stale_rows)
