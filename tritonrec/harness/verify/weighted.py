"""Weighted bags in the job: DLRM on bags of ids with weights, of which some are empty."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...data import Batch, ClickBatch, ClickLoader, KeyedJaggedTensor, Split, WeightedLookup
from ...data.jagged import token_indices
from ...embedding import FeatureConfig
from ..job import Epochs, Job, _clicks


@dataclass(frozen=True)
class WeightedClicks(ClickBatch):
    """A `ClickBatch` with a weighted bag of ids for each feature and sample."""

    lookups = Batch.lookups
    validate = Batch.validate


class WeightedClickLoader(ClickLoader):
    """Row s of the log has bags of (s mod 4) ids: its own and those of the rows before it."""

    def _rows(self, step: int, rows: Tensor) -> WeightedClicks:
        plain = super()._rows(step, rows)
        lengths = rows % 4
        positions, offsets = token_indices(torch.zeros_like(rows), lengths)
        owners = torch.repeat_interleave(rows, lengths)
        ids = self._categories[(owners - positions) % len(self._categories)]
        weights = (owners * 37 + positions * 11) % 16 / 7 - 1
        bags = {
            name: WeightedLookup(ids[:, at].contiguous(), offsets, weights)
            for at, name in enumerate(self.features)
        }
        features = KeyedJaggedTensor.from_dict(bags)
        return WeightedClicks(step, rows, features, plain.dense, plain.labels)


class WeightedJob(Job):
    """The job of a DLRM, on weighted bags."""

    def features(self) -> list[FeatureConfig]:
        """Those of the job, pooled."""
        return [replace(feature, pooling="sum") for feature in super().features()]

    def epochs(self, rank: int = 0, world_size: int = 1) -> Epochs:
        """The loader."""
        return WeightedClickLoader(
            _clicks(self.source, self.words, Split())[0],
            self.batch_size,
            self.seed,
            rank,
            world_size,
            self.balance,
        )
