"""HSTU, the sequence model (Zhai et al., "Actions speak louder than words", ICML 2024, section 3).

    u, v, q, k = silu(linear(norm(x)))          pointwise projection, equation 1
    a = attention(q, k, v)                      pointwise aggregated attention, equation 2
    x = x + linear(dropout(norm(a) * u))        pointwise transformation, equation 3

Dimensions: L tokens, H heads, d model dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from .modules import GatedNorm, LayerNorm, Linear
from .next_item import NextItemModel, Tokens


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

    def forward(self, x: torch.Tensor, tokens: Tokens, seed: int) -> torch.Tensor:
        """`seed`: of this layer's dropout."""
        config = self.config
        uvqk = ops.silu(self.uvqk(self.norm(x), tokens.seq_offsets))
        u, v, q, k = uvqk.split(self.sizes, 1)
        attended = ops.hstu_attention(
            q.unflatten(1, (config.heads, config.qk_dim)),
            k.unflatten(1, (config.heads, config.qk_dim)),
            v.unflatten(1, (config.heads, config.v_dim)),
            tokens.seq_offsets,
            config.max_seq_len,
            alpha=config.qk_dim**-0.5,
            scaling_seqlen=config.max_seq_len,
            num_targets=tokens.num_targets,
        ).flatten(1)
        gated = self.gate(attended, u, seed, tokens.sample_ids, tokens.positions)
        return x + self.output(gated, tokens.seq_offsets)


class HSTU(NextItemModel):
    """Next-item model: rows of items plus positions, HSTU layers, sampled softmax."""

    layer = HSTULayer
