"""FuXi-alpha, the sequence model (Ye et al., "FuXi-alpha: Scaling Recommendation Model with Feature
Interaction Enhanced Transformer", WWW 2025).

    u, v, q, k = silu(linear(norm(x)))
    a = [sum_j w_p(i - j) v_j,  sum_j w_t(log2(t_i - t_j)) v_j,  attention(q, k, v)]     three channels
    y = x + linear(dropout(norm(a) * u))                                                 first stage
    z = y + linear(silu(g) * h),   [g, h] = linear(norm(y))                              second stage, SwiGLU

The channels of relative position and relative time have one learned weight for each head and bucket, without
a SiLU and without a scale; they share the values v with the semantic channel, which is HSTU's attention. The
paper normalises by the root mean square; here it is the layer norm that HSTU has.

Dimensions: L tokens, H heads, d model dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from .modules import GatedMLP, GatedNorm, LayerNorm, Linear, RelativeAggregate
from .next_item import NextItemModel, Tokens


@dataclass(frozen=True)
class FuXiConfig:
    """Sizes of a FuXi model.

    Args:
        dim: d, of embeddings and residual stream. layers, heads: how many. qk_dim, v_dim: features of a head.
        ffn_dim: inner width of the second stage, 2 d unless given. time_buckets: weights of the temporal
            channel; 64 tell all powers of two of a time difference apart, fewer clamp the longest ones.
        max_seq_len: most tokens of a sample, the attention's normaliser, and weights of the positional
            channel. dropout: of the gated norm. temperature: of the sampled softmax.
    """

    dim: int = 64
    layers: int = 2
    heads: int = 2
    qk_dim: int = 32
    v_dim: int = 32
    ffn_dim: int | None = None
    time_buckets: int = 64
    max_seq_len: int = 50
    dropout: float = 0.2
    temperature: float = 1.0


class FuXiLayer(torch.nn.Module):
    """One layer: (L, d) -> (L, d)."""

    def __init__(self, config: FuXiConfig):
        super().__init__()
        self.config = config
        width, qk_width = config.heads * config.v_dim, config.heads * config.qk_dim
        self.sizes = [3 * width, width, qk_width, qk_width]
        self.norm = LayerNorm(config.dim)
        self.uvqk = Linear(config.dim, sum(self.sizes))
        self.by_position = RelativeAggregate(config.heads, config.max_seq_len)
        self.by_time = RelativeAggregate(config.heads, config.time_buckets)
        self.gate = GatedNorm(3 * width, config.dropout)
        self.output = Linear(3 * width, config.dim)
        self.ffn_norm = LayerNorm(config.dim)
        self.ffn = GatedMLP(config.dim, config.ffn_dim or 2 * config.dim, config.dim)

    def forward(self, x: torch.Tensor, tokens: Tokens, seed: int) -> torch.Tensor:
        """`tokens` with timestamps and without targets; `seed`: of this layer's dropout."""
        if tokens.timestamps is None or tokens.num_targets is not None:
            raise ValueError("a FuXi layer needs the tokens' timestamps and has no mask for targets")
        config, offsets = self.config, tokens.seq_offsets
        u, v, q, k = ops.silu(self.uvqk(self.norm(x), offsets)).split(self.sizes, 1)
        v = v.unflatten(1, (config.heads, config.v_dim))
        semantic = ops.hstu_attention(
            q.unflatten(1, (config.heads, config.qk_dim)),
            k.unflatten(1, (config.heads, config.qk_dim)),
            v,
            offsets,
            config.max_seq_len,
            alpha=config.qk_dim**-0.5,
            scaling_seqlen=config.max_seq_len,
        )
        positional = self.by_position(v, offsets, config.max_seq_len)
        temporal = self.by_time(v, offsets, config.max_seq_len, tokens.timestamps)
        channels = torch.cat([channel.flatten(1) for channel in (positional, temporal, semantic)], 1)
        gated = self.gate(channels, u, seed, tokens.sample_ids, tokens.positions)
        y = x + self.output(gated, offsets)
        return y + self.ffn(self.ffn_norm(y), offsets)


class FuXi(NextItemModel):
    """Next-item model: rows of items plus positions, FuXi layers, sampled softmax."""

    layer = FuXiLayer
