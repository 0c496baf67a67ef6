"""HSTU, the sequence model (Zhai et al., "Actions speak louder than words", ICML 2024, section 3).

    u, v, q, k = silu(linear(norm(x)))          pointwise projection, equation 1
    a = attention(q, k, v)                      pointwise aggregated attention, equation 2
    x = x + linear(dropout(norm(a) * u))        pointwise transformation, equation 3

Dimensions: L tokens, B samples, H heads, K negatives, d model dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import ops
from .exact import sum_by_sample
from .modules import GatedNorm, LayerNorm, Linear, PositionalEmbedding

if TYPE_CHECKING:
    from ..data import JaggedBatch


@dataclass(frozen=True)
class HSTUConfig:
    """Sizes of an HSTU model.

    Args:
        dim: d, of embeddings and residual stream. layers, heads: how many.
        qk_dim, v_dim: features of a head. max_seq_len: most tokens of a sample, and the attention's
            normaliser. dropout: of the gated norm. temperature: of the sampled softmax.
    """

    dim: int = 64
    layers: int = 2
    heads: int = 2
    qk_dim: int = 32
    v_dim: int = 32
    max_seq_len: int = 50
    dropout: float = 0.2
    temperature: float = 1.0


class HSTULayer(torch.nn.Module):
    """One layer: (L, d) -> (L, d)."""

    def __init__(self, config: HSTUConfig):
        super().__init__()
        self.config = config
        self.sizes = [
            config.heads * size for size in (config.v_dim, config.v_dim, config.qk_dim, config.qk_dim)
        ]
        self.norm = LayerNorm(config.dim)
        self.uvqk = Linear(config.dim, sum(self.sizes))
        self.gate = GatedNorm(config.heads * config.v_dim, config.dropout)
        self.output = Linear(config.heads * config.v_dim, config.dim)

    def forward(
        self,
        x: torch.Tensor,
        batch: JaggedBatch,
        seed: int,
        sample_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """`sample_ids`, `positions`: (L,) of each token; `seed`: of this layer's dropout."""
        config = self.config
        uvqk = ops.silu(self.uvqk(self.norm(x), batch.offsets))
        u, v, q, k = uvqk.split(self.sizes, 1)
        attended = ops.hstu_attention(
            q.unflatten(1, (config.heads, config.qk_dim)),
            k.unflatten(1, (config.heads, config.qk_dim)),
            v.unflatten(1, (config.heads, config.v_dim)),
            batch.offsets,
            config.max_seq_len,
            alpha=config.qk_dim**-0.5,
            scaling_seqlen=config.max_seq_len,
        ).flatten(1)
        gated = self.gate(attended, u, seed, sample_ids, positions)
        return x + self.output(gated, batch.offsets)


class HSTU(torch.nn.Module):
    """Next-item model: embeddings of items plus positions, HSTU layers, sampled softmax.

    Called as ``model(batch, rows, seed)`` by the trainer; see `tritonrec.pipeline.window.Model`.
    """

    def __init__(self, config: HSTUConfig):
        super().__init__()
        self.config = config
        self.positions = PositionalEmbedding(config.max_seq_len, config.dim)
        self.layers = torch.nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.norm = LayerNorm(config.dim)

    def encode(self, batch: JaggedBatch, rows: torch.Tensor, seed: int = 0) -> torch.Tensor:
        """Hidden states (L, d) from the embedding rows (L, d) of ``batch.ids``."""
        sample_ids, positions = batch.token_sample_ids(), batch.token_positions()
        longest = int(batch.lengths.max()) if batch.num_samples else 0
        if longest > self.config.max_seq_len:
            raise ValueError(f"a sample has {longest} tokens, the model takes {self.config.max_seq_len}")
        x = rows * self.config.dim**0.5 + self.positions(positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, batch, ops.derive_seed(seed, index, 0), sample_ids, positions)
        return self.norm(x)

    def forward(self, batch: JaggedBatch, rows: torch.Tensor, seed: int) -> torch.Tensor:
        """Losses (B,): sums over a sample's tokens.

        Args:
            rows: (L + L + L*K, d) float32, the rows of ``batch.occurrence_keys()``. seed: of dropout.
        """
        tokens, negatives = batch.num_tokens, batch.num_negatives
        items, labels, sampled = rows.split([tokens, tokens, tokens * negatives])
        losses = ops.sampled_softmax(
            self.encode(batch, items, seed),
            labels,
            sampled.unflatten(0, (tokens, negatives)),
            batch.negatives != batch.labels[:, None],
            self.config.temperature,
        )
        return sum_by_sample(losses, batch.offsets)
