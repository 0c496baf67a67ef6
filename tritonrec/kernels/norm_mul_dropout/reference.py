"""Norm, gate and dropout, one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.philox import DROPOUT
from tritonrec.kernels.philox.reference import halves, philox4x32
from tritonrec.kernels.row_terms import add_terms


def kept_columns(seed: int, tag: int, sample: int, position: int, dim: int, threshold: int) -> list[bool]:
    """Which columns of a row survive: word d % 4 of Philox block d // 4 is at least the threshold."""
    key, low_high, place = halves(seed), halves(sample), position & 0xFFFFFFFF
    words = [w for block in range((dim + 3) // 4) for w in philox4x32((*low_high, tag | block, place), key)]
    return [word >= threshold for word in words[:dim]]


def mask(
    seed: int,
    tag: int,
    samples: torch.Tensor,
    positions: torch.Tensor,
    dim: int,
    threshold: int,
    factor: float,
) -> torch.Tensor:
    """(L, D): `factor` where a column survives, else 0."""
    pairs = zip(samples.tolist(), positions.tolist(), strict=True)
    rows = [kept_columns(seed, tag, sample, position, dim, threshold) for sample, position in pairs]
    return torch.tensor(rows, dtype=torch.float32, device=samples.device).view(-1, dim) * factor


def kept_of(
    x: torch.Tensor, p: float, seed: int, sample_ids: torch.Tensor | None, positions: torch.Tensor | None
) -> torch.Tensor | None:
    """The mask for rows x (L, D), None without dropout."""
    if not p or sample_ids is None or positions is None or x.numel() == 0:
        return None
    return mask(seed, DROPOUT, sample_ids, positions, x.shape[1], int(p * 2**32), 1 / (1 - p))


def norm_mul_dropout(
    x: torch.Tensor, u: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float, p: float,
    seed: int, sample_ids: torch.Tensor | None, positions: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """y (L, D), and means and rstds (L,) of the rows of x."""
    y, means, rstds = x.new_empty(x.shape), x.new_zeros(len(x)), x.new_zeros(len(x))
    kept = kept_of(x, p, seed, sample_ids, positions)
    for t, row in enumerate(x if x.numel() else ()):
        means[t] = row.sum() / len(row)
        centred = row - means[t]
        rstds[t] = 1 / torch.sqrt((centred * centred).sum() / len(row) + eps)
        y[t] = centred * rstds[t] * weight + bias
        if u is not None:
            y[t] = u[t] * y[t]
        if kept is not None:
            y[t] = y[t] * kept[t]
    return y, means, rstds


def norm_mul_dropout_backward(
    dy: torch.Tensor, x: torch.Tensor, u: torch.Tensor | None, *rest
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, du (of no rows without u), and each token's terms of dweight and dbias, all (L, D)."""
    du = x.new_empty(x.shape) if u is not None else x.new_empty(0, x.shape[1])
    dx, dweight, dbias = norm_mul_dropout_backward_into(du, dy, x, u, *rest)
    return dx, du, dweight, dbias


def norm_mul_dropout_backward_into(
    du: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, u: torch.Tensor | None, weight: torch.Tensor,
    bias: torch.Tensor, p: float, seed: int, sample_ids: torch.Tensor | None, positions: torch.Tensor | None,
    means: torch.Tensor, rstds: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dx and the terms of dweight and dbias; overwrites du."""
    dx, dweight, dbias = (x.new_empty(x.shape) for _ in range(3))
    kept = kept_of(x, p, seed, sample_ids, positions)
    for t, row in enumerate(x):
        g = dy[t] if kept is None else dy[t] * kept[t]
        normed = (row - means[t]) * rstds[t]
        if u is not None:
            du[t] = g * (normed * weight + bias)
            g = g * u[t]
        dbias[t] = g
        dweight[t] = g * normed
        slope = g * weight
        level, along = slope.sum() / len(row), (slope * normed).sum() / len(row)
        dx[t] = rstds[t] * (slope - level - normed * along)
    return dx, dweight, dbias


def by_terms(
    backward_into: Callable[..., tuple[torch.Tensor, ...]], impl: Impl
) -> Callable[..., torch.Tensor]:
    """`norm_mul_dropout_backward_exact` by the op into du, whose terms are rounded and added afterwards."""

    def norm_mul_dropout_backward_exact(
        weight_sums: torch.Tensor, bias_sums: torch.Tensor, du: torch.Tensor | None, dy: torch.Tensor,
        x: torch.Tensor, *rest: Any,
    ) -> torch.Tensor:  # fmt: skip
        """dx; overwrites du, which is None without u; dweight and dbias are added to int64 sums (D,)."""
        *given, fraction_bits, names = rest
        into = x.new_empty(0, x.shape[1]) if du is None else du
        dx, *terms = backward_into(into, dy, x, *given)
        add_terms((weight_sums, bias_sums), terms, fraction_bits, names, impl)
        return dx

    return norm_mul_dropout_backward_exact


norm_mul_dropout_backward_exact = by_terms(norm_mul_dropout_backward_into, "reference")
