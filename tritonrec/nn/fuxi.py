"""FuXi-alpha, the sequence model (Ye et al., "FuXi-alpha: Scaling Recommendation Model with Feature
Interaction Enhanced Transformer", WWW 2025).

    u, v, q, k = silu(linear(norm(x)))
    a = [sum_j w_p(i - j) v_j,  sum_j w_t(log2(t_i - t_j)) v_j,  attention(q, k, v)]     three channels
    y = x + linear(dropout(norm(a) * u))                                                 first stage
    z = y + linear(silu(g) * h),   [g, h] = linear(norm(y))                              second stage, SwiGLU

The channels of relative position and relative time have one learned weight for each head and bucket, without
a SiLU and without a scale; they share the values v with the semantic channel, which is HSTU's attention. The
paper normalises by the root mean square, ``norm="rms"``; the default is the layer norm that HSTU has, because
the fused layer is made for it.

Dimensions: L tokens, H heads, d model dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .. import ops
from ..settings import check_number, typed
from .hstu_layer import hstu_layer
from .layers import RMSNorm
from .modules import GatedMLP, GatedNorm, GatedRMSNorm, LayerNorm, Linear, RelativeAggregate
from .next_item import LayerConfig, NextItemModel
from .tokens import Tokens

EPS = 1e-6


@typed
@dataclass(frozen=True)
class FuXiConfig(LayerConfig):
    """Sizes of a FuXi model, beside those of `LayerConfig`.

    Args:
        ffn_dim: inner width of the second stage, 2 d unless given. temperature: of the sampled softmax.
        norm: "layer", or "rms" as published, of single ops that keep all they compute: `recompute` has no
            effect on it.
    """

    ffn_dim: int | None = None
    temperature: float = 1.0
    norm: Literal["layer", "rms"] = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("temperature", self.temperature, positive=True)


class FuXiLayer(torch.nn.Module):
    """One layer: (L, d) -> (L, d)."""

    def __init__(self, config: FuXiConfig):
        super().__init__()
        self.config = config
        width, qk_width = config.heads * config.v_dim, config.heads * config.qk_dim
        self.sizes = [3 * width, width, qk_width, qk_width]
        rms = config.norm == "rms"
        self.norm = RMSNorm(config.dim, EPS) if rms else LayerNorm(config.dim)
        self.uvqk = Linear(config.dim, sum(self.sizes))
        self.by_position = RelativeAggregate(config.heads, config.max_seq_len)
        self.by_time = RelativeAggregate(config.heads, config.time_buckets)
        self.gate = (GatedRMSNorm if rms else GatedNorm)(3 * width, config.dropout)
        self.output = Linear(3 * width, config.dim)
        self.ffn_norm = RMSNorm(config.dim, EPS) if rms else LayerNorm(config.dim)
        self.ffn = GatedMLP(config.dim, config.ffn_dim or 2 * config.dim, config.dim)

    def forward(self, x: torch.Tensor, tokens: Tokens, seed: int) -> torch.Tensor:
        """`tokens` with timestamps and without targets; `seed`: of this layer's dropout."""
        if tokens.timestamps is None or tokens.num_targets is not None:
            raise ValueError("a FuXi layer needs the tokens' timestamps and has no mask for targets")
        if self.config.norm == "rms":
            y = self.first_stage(x, tokens, seed)
        else:
            tables = {"by_position": self.by_position.weight, "by_time": self.by_time.weight}
            y = hstu_layer(self, x, tokens, seed, **tables)
        return y + self.ffn(self.ffn_norm(y), tokens.seq_offsets)

    def first_stage(self, x: torch.Tensor, tokens: Tokens, seed: int) -> torch.Tensor:
        """The first stage of single ops, with whatever `norm` and `gate` are."""
        config, offsets = self.config, tokens.seq_offsets
        uvqk = ops.silu(self.uvqk(self.norm(x), offsets))
        u, *vqk = uvqk.split(self.sizes, 1)
        v, q, k = (part.unflatten(1, (config.heads, -1)) for part in vqk)
        # The gradients of v are added in the reverse of this order, as the fused layer does.
        attended = ops.hstu_attention(
            q, k, v, offsets, config.max_seq_len, alpha=config.qk_dim**-0.5, scaling_seqlen=config.max_seq_len
        )
        positional = self.by_position(v, offsets, config.max_seq_len)
        temporal = self.by_time(v, offsets, config.max_seq_len, tokens.timestamps)
        attended = torch.cat([channel.flatten(1) for channel in (positional, temporal, attended)], 1)
        return x + self.output(self.gate(attended, u, seed, tokens.sample_ids, tokens.positions), offsets)


class FuXi(NextItemModel):
    """Next-item model: rows of items plus positions, FuXi layers, sampled softmax."""

    layer = FuXiLayer
