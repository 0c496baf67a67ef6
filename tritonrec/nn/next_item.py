"""What next-item models share: rows of items plus positions, layers, a norm, and a sampled softmax.

A model names its `layer`, which is built from the configuration and called as ``layer(x, tokens, seed)``.

Dimensions: L tokens, B samples, K negatives, d model dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import ops
from .exact import sum_by_sample
from .modules import LayerNorm, PositionalEmbedding

if TYPE_CHECKING:
    from ..data import JaggedBatch


class Tokens(NamedTuple):
    """Where the tokens (L,) of a batch stand. All int64; nothing here depends on a sample's neighbours."""

    seq_offsets: torch.Tensor  # (B + 1,), sample b owns tokens seq_offsets[b] : seq_offsets[b + 1]
    sample_ids: torch.Tensor  # (L,)
    positions: torch.Tensor  # (L,), in the sample, from 0
    timestamps: torch.Tensor | None = None  # (L,)
    num_targets: torch.Tensor | None = None  # (B,), the last so many tokens do not see each other

    @classmethod
    def place(
        cls,
        seq_offsets: torch.Tensor,
        sample_ids: torch.Tensor,
        max_seq_len: int,
        timestamps: torch.Tensor | None = None,
        num_targets: torch.Tensor | None = None,
    ) -> Tokens:
        """From offsets (B + 1,) and one id for each sample (B,).

        Raises:
            ValueError: a sample is longer than `max_seq_len`.
        """
        lengths = seq_offsets.diff()
        longest = int(lengths.max()) if len(lengths) else 0
        if longest > max_seq_len:
            raise ValueError(f"a sample has {longest} tokens, the model takes {max_seq_len}")
        owners = torch.repeat_interleave(sample_ids, lengths)
        starts = torch.repeat_interleave(seq_offsets[:-1], lengths)
        positions = torch.arange(len(owners), device=starts.device) - starts
        return cls(seq_offsets, owners, positions, timestamps, num_targets)


class NextItemModel(torch.nn.Module):
    """Called as ``model(batch, rows, seed)`` by the trainer; see `tritonrec.pipeline.Model`.

    Args:
        config: with ``dim``, ``layers``, ``max_seq_len`` and ``temperature``, and what `layer` needs.
    """

    layer: type[torch.nn.Module]

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.positions = PositionalEmbedding(config.max_seq_len, config.dim)
        self.layers = torch.nn.ModuleList(self.layer(config) for _ in range(config.layers))
        self.norm = LayerNorm(config.dim)

    def encode(self, batch: JaggedBatch, rows: torch.Tensor, seed: int = 0) -> torch.Tensor:
        """Hidden states (L, d) from the embedding rows (L, d) of ``batch.ids``."""
        tokens = Tokens.place(batch.offsets, batch.sample_ids, self.config.max_seq_len, batch.timestamps)
        x = rows * self.config.dim**0.5 + self.positions(tokens.positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, tokens, ops.derive_seed(seed, index, 0))
        return self.norm(x)

    def forward(self, batch: JaggedBatch, rows: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
        """Losses (B,): sums over a sample's tokens.

        Args:
            rows: ``item``, (L + L + L*K, d) float32, of ids, labels and negatives. seed: of dropout.
        """
        tokens, negatives = batch.num_tokens, batch.num_negatives
        items, labels, sampled = rows["item"].split([tokens, tokens, tokens * negatives])
        losses = ops.sampled_softmax(
            self.encode(batch, items, seed),
            labels,
            sampled.unflatten(0, (tokens, negatives)),
            batch.negatives != batch.labels[:, None],
            self.config.temperature,
        )
        return sum_by_sample(losses, batch.offsets)
