"""Sizes that models of HSTU's kind share, and the next-item model: rows of items plus positions, layers, a
norm, and a sampled softmax.

A model names its `layer`, which is built from the configuration and called as ``layer(x, tokens, seed)``.

Dimensions: L tokens, B samples, K negatives, d model dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .. import ops
from ..settings import setting, typed
from .context import takes_indexed_rows
from .hstu_layer import check_recompute
from .modules import LayerNorm, PositionalEmbedding, TokenDropout
from .next_item_losses import losses_by_sample, split
from .tokens import Tokens, sum_by_sample


@typed
@dataclass(frozen=True)
class LayerConfig:
    """Sizes that models of HSTU's kind share.

    Args:
        dim: d, of embeddings and residual stream. layers, heads: how many. qk_dim, v_dim: features of a head.
        max_seq_len: most tokens of a sample, and the attention's normaliser. dropout: of the gated norm.
        input_dropout: of the first layer's input, rows plus positions.
        time_buckets: weights for powers of two of a time difference, where a model has them; 64 tell all
            powers apart, fewer clamp the longest ones.
        recompute: what a layer's backward computes again instead of keeping it, of "norm", "uvqk", "silu",
            "attention" and "gate". It changes memory and time, and no bit.
    """

    dim: int = setting(64, "Embedding and model dimension.", 1, 65_536)
    layers: int = setting(2, "HSTU layers.", 0, 1024)
    heads: int = setting(2, "Attention heads.", 1, 4096)
    qk_dim: int = 32
    v_dim: int = 32
    max_seq_len: int = setting(50, "Tokens per sample at most; grm: of history.", 1, 2**20)
    dropout: float = setting(0.2, "Share of values that the gated norm drops.", 0, 0.99)
    input_dropout: float = setting(0.0, "Share of values dropped before the first layer.", 0, 0.99)
    time_buckets: int = 64
    recompute: tuple[str, ...] = setting(
        ("norm",), "Parts that a layer's backward computes again: norm,uvqk,silu,attention,gate."
    )

    def __post_init__(self) -> None:
        check_recompute(self.recompute)


class NextItemInput(Protocol):
    """The parts of a batch that a next-item model reads; `tritonrec.data.JaggedBatch` has them. All int64."""

    @property
    def sample_ids(self) -> torch.Tensor: ...  # (B,)

    @property
    def offsets(self) -> torch.Tensor: ...  # (B + 1,), of the tokens

    @property
    def timestamps(self) -> torch.Tensor: ...  # (L,)

    @property
    def labels(self) -> torch.Tensor: ...  # (L,), the items that follow

    @property
    def negatives(self) -> torch.Tensor: ...  # (L, K), items beside the label


class NextItemModel(torch.nn.Module):
    """Called as ``model(batch, rows, seed)`` by the trainer; see `tritonrec.pipeline.Model`.

    Args:
        config: a `LayerConfig` with ``temperature``, and what `layer` needs.
    """

    layer: type[torch.nn.Module]

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.positions = PositionalEmbedding(config.max_seq_len, config.dim)
        self.drop = TokenDropout(config.input_dropout)
        self.layers = torch.nn.ModuleList(self.layer(config) for _ in range(config.layers))
        self.norm = LayerNorm(config.dim)

    def place(self, batch: NextItemInput) -> Tokens:
        """Where the batch's tokens stand."""
        return Tokens.place(batch.offsets, batch.sample_ids, self.config.max_seq_len, batch.timestamps)

    def encode(self, batch: NextItemInput, rows: torch.Tensor, seed: int = 0) -> torch.Tensor:
        """Hidden states (L, d) from the embedding rows (L, d) of the tokens."""
        tokens = self.place(batch)
        x = rows * self.config.dim**0.5 + self.positions(tokens.positions)
        x = self.drop(x, ops.derive_seed(seed, len(self.layers), 0), tokens.sample_ids, tokens.positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, tokens, ops.derive_seed(seed, index, 0))
        return self.norm(x)

    @takes_indexed_rows
    def forward(self, batch: NextItemInput, rows: dict[str, Any], seed: int) -> torch.Tensor:
        """Losses (B,): sums over a sample's tokens.

        Args:
            rows: ``item``, (L + L + L*K, d) float32, of ids, labels and negatives, or `ops.IndexedRows` of
                as many, whose negatives are in no memory. seed: of dropout.
        """
        tokens = len(batch.negatives)
        valid = batch.negatives != batch.labels[:, None]
        item = rows["item"]
        if isinstance(item, ops.IndexedRows):
            near, negatives = item.rows[: 2 * tokens], item.rows[2 * tokens :].view(valid.shape)
            items, labels = split(ops.gather_rows(item.values, near), tokens)
            hidden, given = self.encode(batch, items, seed), (item.values, valid, self.config.temperature)
            return sum_by_sample(ops.sampled_softmax(hidden, labels, *given, rows=negatives), batch.offsets)
        items, others = split(item, tokens)
        hidden = self.encode(batch, items, seed)
        return losses_by_sample(hidden, others, valid, batch.offsets, self.config.temperature)
