"""Norm, gate and dropout, one row at a time."""

from __future__ import annotations

import torch

from tritonrec.kernels.philox.reference import halves, philox4x32


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


def forward(
    x: torch.Tensor, u: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float,
    kept: torch.Tensor | None, y: torch.Tensor, means: torch.Tensor, rstds: torch.Tensor,
) -> None:  # fmt: skip
    for t, row in enumerate(x):
        means[t] = row.sum() / len(row)
        centred = row - means[t]
        rstds[t] = 1 / torch.sqrt((centred * centred).sum() / len(row) + eps)
        y[t] = centred * rstds[t] * weight + bias
        if u is not None:
            y[t] = u[t] * y[t]
        if kept is not None:
            y[t] = y[t] * kept[t]


def backward(
    dy: torch.Tensor, x: torch.Tensor, u: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor,
    kept: torch.Tensor | None, means: torch.Tensor, rstds: torch.Tensor,
    dx: torch.Tensor, du: torch.Tensor, dweight: torch.Tensor, dbias: torch.Tensor,
) -> None:  # fmt: skip
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
