"""What models share: sizes, places of tokens, and for the next item rows of items plus positions, layers, a
norm, and a sampled softmax.

A model names its `layer`, which is built from the configuration and called as ``layer(x, tokens, seed)``.

Dimensions: L tokens, B samples, K negatives, d model dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import ops
from .exact import sum_by_sample
from .modules import LayerNorm, PositionalEmbedding
from .transduction import check_recompute

if TYPE_CHECKING:
    from ..data import JaggedBatch


class Tokens(NamedTuple):
    """Where the tokens (L,) of a batch stand. All int64; nothing here depends on a sample's neighbours."""

    seq_offsets: torch.Tensor  # (B + 1,), sample b owns tokens seq_offsets[b] : seq_offsets[b + 1]
    sample_ids: torch.Tensor  # (L,)
    positions: torch.Tensor  # (L,), in the sample, from 0
    timestamps: torch.Tensor | None = None  # (L,)
    num_targets: torch.Tensor | None = None  # (B,), the last so many tokens do not see each other
    query_timestamps: torch.Tensor | None = None  # (L,), when a token asks, where not at its own time

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

    def asking_at_next(self) -> Tokens:
        """The same tokens, each asking at the time of its sample's next one, the last at its own."""
        assert self.timestamps is not None
        last = self.positions.roll(-1) == 0
        times = torch.where(last, self.timestamps, self.timestamps.roll(-1))
        return self._replace(query_timestamps=times)


@dataclass(frozen=True)
class LayerConfig:
    """Sizes that models of HSTU's kind share.

    Args:
        dim: d, of embeddings and residual stream. layers, heads: how many. qk_dim, v_dim: features of a head.
        max_seq_len: most tokens of a sample, and the attention's normaliser. dropout: of the gated norm.
        time_buckets: weights for powers of two of a time difference, where a model has them; 64 tell all
            powers apart, fewer clamp the longest ones.
        recompute: what a layer's backward computes again instead of keeping it, of "norm", "uvqk", "silu",
            "attention" and "gate". It changes memory and time, and no bit.
    """

    dim: int = 64
    layers: int = 2
    heads: int = 2
    qk_dim: int = 32
    v_dim: int = 32
    max_seq_len: int = 50
    dropout: float = 0.2
    time_buckets: int = 64
    recompute: tuple[str, ...] = ("norm",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute", check_recompute(self.recompute))


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
        self.layers = torch.nn.ModuleList(self.layer(config) for _ in range(config.layers))
        self.norm = LayerNorm(config.dim)

    def place(self, batch: JaggedBatch) -> Tokens:
        """Where the batch's tokens stand."""
        return Tokens.place(batch.offsets, batch.sample_ids, self.config.max_seq_len, batch.timestamps)

    def encode(self, batch: JaggedBatch, rows: torch.Tensor, seed: int = 0) -> torch.Tensor:
        """Hidden states (L, d) from the embedding rows (L, d) of ``batch.ids``."""
        tokens = self.place(batch)
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
