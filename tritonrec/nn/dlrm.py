"""DLRM (Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
arXiv 1906.00091): the probability of a click from dense and categorical features.

::

    dense (B, F)                 rows of C categorical features, (B, d) each
      bottom MLP
      (B, d) ─────────────┬──────────┘
        │        dot products of all pairs of the C + 1 vectors, (B, (C + 1) C / 2)
        └──────── concatenated ──────┘
                      top MLP
                     logit (B, 1)

MLPs are linear layers with ReLU between them; the bottom one ends in a ReLU too. Without dense features
(F = 0) there is no bottom MLP, and C vectors interact. Products of pairs (`ops.dot_interaction`) are computed
alike wherever a sample stands in the batch, so losses and gradients depend on that sample alone, bit for bit.

Dimensions: B samples, F dense features, C categorical ones, V = C + 1 vectors, P pairs, d columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from .. import ops
from ..settings import typed
from .context import record
from .losses import binary_cross_entropy, sigmoid
from .modules import Linear


@typed
@dataclass(frozen=True)
class DLRMConfig:
    """Sizes of a DLRM.

    Args:
        features: names of the categorical features, in the order in which they interact.
        dense: F, dense features; 0 for none.
        dim: d, columns of an embedding row.
        bottom, top: widths of the hidden layers; the bottom MLP ends in `dim`, the top one in 1.

    Raises ValueError naming a size out of range.
    """

    features: tuple[str, ...]
    dense: int = 13
    dim: int = 16
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256)

    def __post_init__(self) -> None:
        if not self.features or len(set(self.features)) != len(self.features):
            raise ValueError(f"DLRM needs categorical features with distinct names, got {self.features}")
        if self.dense < 0:
            raise ValueError(f"dense must be at least 0, got {self.dense}")
        for name, widths in (("dim", (self.dim,)), ("bottom", self.bottom), ("top", self.top)):
            if min(widths, default=1) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class ClickInput(Protocol):
    """The parts of a batch that DLRM reads; `tritonrec.data.ClickBatch` has them."""

    @property
    def dense(self) -> torch.Tensor: ...  # (B, F) float32

    @property
    def labels(self) -> torch.Tensor: ...  # (B,) int64, 0 or 1


class DLRM(torch.nn.Module):
    """Called as ``model(batch, rows, seed)`` by the trainer; see `tritonrec.pipeline.Model`."""

    def __init__(self, config: DLRMConfig):
        super().__init__()
        self.config = config
        vectors = len(config.features) + (config.dense > 0)
        pairs = vectors * (vectors - 1) // 2
        self.bottom = _layers([config.dense, *config.bottom, config.dim]) if config.dense else None
        self.top = _layers([pairs + (config.dim if config.dense else 0), *config.top, 1])

    def forward(self, batch: ClickInput, rows: Mapping[str, torch.Tensor], seed: int = 0) -> torch.Tensor:
        """Cross entropies (B,) of the clicks. `rows` holds (B, d) for each feature; nothing is drawn.

        Logits and labels (B,) are recorded.
        """
        logits = self.logits(batch.dense, rows)
        record(logits=logits[:, 0], labels=batch.labels)
        return binary_cross_entropy(logits, batch.labels[:, None])

    @torch.no_grad()
    def predict(self, batch: ClickInput, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Probabilities (B,) of a click."""
        return sigmoid(self.logits(batch.dense, rows)).squeeze(1)

    def logits(self, dense: torch.Tensor, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(B, 1) from dense features (B, F) and rows (B, d) by name: `bottom_vectors`, then `top_logits`.

        Raises ValueError where the dense features are not F, or a feature has no rows.
        """
        return self.top_logits(self.bottom_vectors(dense), rows)

    def bottom_vectors(self, dense: torch.Tensor) -> torch.Tensor | None:
        """(B, d) from dense features (B, F), before any row is needed; None without a bottom MLP."""
        if dense.dim() != 2 or dense.shape[1] != self.config.dense:
            raise ValueError(f"dense must be (B, {self.config.dense}), got {tuple(dense.shape)}")
        return None if self.bottom is None else torch.relu(_apply(self.bottom, dense))

    def top_logits(self, x: torch.Tensor | None, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(B, 1) from what `bottom_vectors` returned and rows (B, d) by name."""
        missing = [name for name in self.config.features if name not in rows]
        if missing:
            raise ValueError(f"rows of feature {missing[0]!r} are missing, there are {sorted(rows)}")
        vectors = [rows[name] for name in self.config.features]
        if x is None:
            return _apply(self.top, interact(*vectors))
        return _apply(self.top, torch.cat([x, interact(x, *vectors)], 1))


def interact(*vectors: torch.Tensor) -> torch.Tensor:
    """Dot products of all pairs of V vectors (B, d) of each sample, as `ops.dot_interaction`: (B, P)."""
    return ops.dot_interaction(torch.stack(vectors, 1))


def partition_tables(table_bytes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """The rank of each table where whole tables are kept on one rank (table-wise partitioning), for serving.

    Training does not use it: `HashTableCollection` spreads the rows of every table over all ranks. The
    largest table goes first, each to the rank that holds the least so far, the lowest of equal ones.

    Args:
        table_bytes: bytes of each table, or anything its cost is proportional to.
        world_size: number of ranks; some stay empty where there are fewer tables.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    load = [0] * world_size
    owners = {}
    for name in sorted(table_bytes, key=lambda name: (-table_bytes[name], name)):
        rank = load.index(min(load))
        owners[name] = rank
        load[rank] += table_bytes[name]
    return owners


def _layers(widths: Sequence[int]) -> torch.nn.ModuleList:
    return torch.nn.ModuleList(Linear(*pair) for pair in pairwise(widths))


def _apply(layers: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for index, layer in enumerate(layers):
        x = layer(torch.relu(x) if index else x)
    return x
