"""SASRec, the sequence model (Kang and McAuley, "Self-attentive sequential recommendation", ICDM 2018).

    x = x + dropout(linear(attention(q, k, v)))       q, k, v = linear(norm(x)), causal softmax attention
    x = x + dropout(linear(relu(linear(norm(x)))))

Rows are jagged: no sequence is padded, and none is cut to the places of another. Norms come before each part,
as in later implementations, and the weights of attention have no dropout.

Dimensions: L tokens, H heads, d model dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .. import ops
from ..kernels.dispatch import implementation, imported
from ..settings import check_number, typed
from .modules import LayerNorm, Linear, TokenDropout
from .next_item import LayerConfig, NextItemModel
from .tokens import Tokens


@typed
@dataclass(frozen=True)
class SASRecConfig(LayerConfig):
    """Sizes of a SASRec model, beside those of `LayerConfig`; `recompute` and `time_buckets` have no effect.

    Args:
        dropout: of the two parts of a layer. ffn_dim: inner width of the second one, d unless given.
        temperature: of the sampled softmax.
    """

    ffn_dim: int | None = None
    temperature: float = 1.0
    relative_bias = False  # no field: it takes no times

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("temperature", self.temperature, positive=True)
        if self.ffn_dim is not None and self.ffn_dim < 1:
            raise ValueError(f"ffn_dim must be at least 1, got {self.ffn_dim}")


class SASRecLayer(torch.nn.Module):
    """One layer: (L, d) -> (L, d)."""

    def __init__(self, config: SASRecConfig):
        super().__init__()
        self.config = config
        width, inner = config.heads * config.v_dim, config.dim if config.ffn_dim is None else config.ffn_dim
        self.sizes = [config.heads * config.qk_dim, config.heads * config.qk_dim, width]
        self.norm, self.ffn_norm = LayerNorm(config.dim), LayerNorm(config.dim)
        self.qkv, self.output = Linear(config.dim, sum(self.sizes)), Linear(width, config.dim)
        self.inner, self.outer = Linear(config.dim, inner), Linear(inner, config.dim)
        self.drop = TokenDropout(config.dropout)

    def forward(self, x: torch.Tensor, tokens: Tokens, seed: int) -> torch.Tensor:
        """`seed`: of this layer's dropout."""
        offsets, draws = tokens.seq_offsets, (tokens.sample_ids, tokens.positions)
        q, k, v = self._projected(x, offsets)
        attended = ops.softmax_attention(q, k, v, offsets, self.config.max_seq_len, causal=True)
        x = x + self.drop(self.output(attended.flatten(1), offsets), ops.derive_seed(seed, 1, 0), *draws)
        return x + self.drop(self._fed(x, offsets), ops.derive_seed(seed, 2, 0), *draws)

    def over(
        self,
        x: torch.Tensor,
        tokens: Tokens,
        fresh_offsets: torch.Tensor,
        keep: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `hstu_layer.hstu_layer_over`."""
        q, k, v = self._projected(x)
        k, v = keep(k, v)
        if wanted is not None:
            x, q = x[wanted], q[wanted]
            fresh_offsets = torch.arange(fresh_offsets.shape[0], device=x.device)
        kind = "triton" if (on_device := implementation("auto", x) == "triton") else "numba"
        kernels = imported(f"{ops.__package__}.kernels.softmax_attention.{kind}_softmax_attention")
        # as the op, which widens for the CPU alone
        parts = (q, k, v) if on_device else (q.float(), k.float(), v.float())
        call = self.config.max_seq_len, self.config.qk_dim**-0.5, True, None, 0.0, 0, None
        attended, *_ = kernels.softmax_attention(*parts, fresh_offsets, tokens.seq_offsets, *call, last=True)
        attended = attended.to(v.dtype)
        x = x + self.output(attended.flatten(1))
        return x + self._fed(x)

    def _projected(self, x: torch.Tensor, offsets: torch.Tensor | None = None) -> list[torch.Tensor]:
        """q and k (L, H, qk_dim), v (L, H, v_dim)."""
        parts = self.qkv(self.norm(x), offsets).split(self.sizes, 1)
        return [part.unflatten(1, (self.config.heads, -1)) for part in parts]

    def _fed(self, x: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        return self.outer(F.relu(self.inner(self.ffn_norm(x), offsets)), offsets)


class SASRec(NextItemModel):
    """Next-item model: rows of items plus positions, SASRec layers, sampled softmax."""

    layer = SASRecLayer
