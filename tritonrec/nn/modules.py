"""Small modules of our models: each row of their output depends on one sample only, bit for bit."""

from __future__ import annotations

import torch

from .. import ops
from ..settings import check_number
from . import layers


class Linear(layers.Linear):
    """`tritonrec.nn.Linear` as models of ours have it: normal with deviation ``in_features ** -0.5``.

    The bias starts at zero.
    """

    def reset_parameters(self) -> None:
        """Normal and zeros."""
        with torch.no_grad():
            self.weight.copy_(torch.randn(self.weight.shape, dtype=torch.float32) * self.in_features**-0.5)
            if self.bias is not None:
                self.bias.zero_()


class MLP(torch.nn.Module):
    """``linear(silu(linear(x)))``: (L, in) -> (L, hidden) -> (L, out)."""

    def __init__(self, in_features: int, hidden: int, out_features: int):
        super().__init__()
        self.inner = Linear(in_features, hidden)
        self.outer = Linear(hidden, out_features)

    def forward(self, x: torch.Tensor, seq_offsets: torch.Tensor | None = None) -> torch.Tensor:
        """As `Linear`."""
        return self.outer(ops.silu(self.inner(x, seq_offsets)), seq_offsets)


class GatedMLP(torch.nn.Module):
    """``linear(silu(g) * h)`` with ``[g, h] = linear(x)``, a SwiGLU: (L, in) -> (L, hidden) -> (L, out)."""

    def __init__(self, in_features: int, hidden: int, out_features: int):
        super().__init__()
        self.inner = Linear(in_features, 2 * hidden)
        self.outer = Linear(hidden, out_features)

    def forward(self, x: torch.Tensor, seq_offsets: torch.Tensor | None = None) -> torch.Tensor:
        """As `Linear`."""
        gate, value = self.inner(x, seq_offsets).chunk(2, 1)
        return self.outer(ops.silu(gate) * value, seq_offsets)


class LayerNorm(layers.LayerNorm):
    """`tritonrec.nn.LayerNorm` with the epsilon of HSTU's published code."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__(dim, eps)


class GatedNorm(torch.nn.Module):
    """``u * layer_norm(x)`` with dropout whose mask is a function of (seed, sample, position, column).

    With `norm_product` it is ``layer_norm(u * x)``.
    """

    def __init__(self, dim: int, dropout: float = 0.0, eps: float = 1e-6, norm_product: bool = False):
        super().__init__()
        check_number("dropout", dropout, 1)
        check_number("eps", eps)
        self.dropout, self.eps, self.norm_product = dropout, eps, norm_product
        self.weight = torch.nn.Parameter(torch.ones(dim, dtype=torch.float32))
        self.bias = torch.nn.Parameter(torch.zeros(dim, dtype=torch.float32))

    def forward(
        self,
        x: torch.Tensor,
        u: torch.Tensor,
        seed: int,
        sample_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """x, u (L, dim); sample_ids, positions (L,) int64 of each token."""
        dropout = self.dropout if self.training else 0.0
        if self.norm_product:
            x, u = x * u, torch.ones_like(u)
        return ops.norm_mul_dropout(
            x, u, self.weight, self.bias, self.eps, dropout, seed, sample_ids, positions
        )


class TokenDropout(torch.nn.Module):
    """Dropout of tokens' rows; the mask is a function of (seed, sample, position, column)."""

    def __init__(self, p: float):
        super().__init__()
        check_number("p", p, 1)
        self.p = p

    def forward(
        self, x: torch.Tensor, seed: int, sample_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """x (L, dim); sample_ids, positions (L,) int64 of each token."""
        return ops.dropout(x, self.p, seed, sample_ids, positions) if self.training and self.p else x

    def extra_repr(self) -> str:
        return f"p={self.p}"


class GatedRMSNorm(torch.nn.Module):
    """``u * rms_norm(x)`` with the dropout of `GatedNorm`."""

    def __init__(self, dim: int, dropout: float = 0.0, eps: float = 1e-6):
        super().__init__()
        self.norm, self.drop = layers.RMSNorm(dim, eps), TokenDropout(dropout)

    def forward(
        self,
        x: torch.Tensor,
        u: torch.Tensor,
        seed: int,
        sample_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """As `GatedNorm`."""
        return self.drop(self.norm(x) * u, seed, sample_ids, positions)


class PositionalEmbedding(torch.nn.Module):
    """A learned row (dim) for each position in [0, max_seq_len)."""

    def __init__(self, max_seq_len: int, dim: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(max_seq_len, dim, dtype=torch.float32) * 0.02)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """(L,) int64 -> (L, dim)."""
        return ops.gather_rows(self.weight, positions)


class RelativeBias(torch.nn.Module):
    """Learned weights of attention's relative bias, one for each place back and each power of two of time."""

    def __init__(self, max_seq_len: int, time_buckets: int):
        super().__init__()
        self.pos_weights = torch.nn.Parameter(torch.randn(max_seq_len, dtype=torch.float32) * 0.02)
        self.ts_weights = torch.nn.Parameter(torch.randn(time_buckets, dtype=torch.float32) * 0.02)


class RelativeAggregate(torch.nn.Module):
    """Causal sums with a learned weight for each head and bucket of relative position or time."""

    def __init__(self, heads: int, buckets: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(heads, buckets, dtype=torch.float32) * 0.02)

    def forward(
        self,
        v: torch.Tensor,
        seq_offsets: torch.Tensor,
        max_seq_len: int,
        timestamps: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(L, H, D) -> (L, H, D), as `ops.relative_aggregate`."""
        return ops.relative_aggregate(v, self.weight, seq_offsets, max_seq_len, timestamps)
