"""Rows of features, and of bags of ids: their sum or mean, and weights.

A weighted bag takes each row times the weight of its id, before the sum::

    bag j   sum over its ids i of  weight[i] * row[id[i]]

The bits of a bag, and of the gradients of its rows and weights, depend on nothing outside of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from .. import ops
from ..data.jagged import WeightedLookup

Pooling = Literal["none", "sum", "mean"]


def weighted_rows(name: str, rows: torch.Tensor, pooling: str, lookup: Any) -> torch.Tensor:
    """The rows (n, dim) of a feature's lookup, times its weights (n,) float32 where it has any.

    Differentiable in both. Raises ValueError for weights that do not fit, or another pooling than ``"sum"``.
    """
    if not isinstance(lookup, WeightedLookup):
        return rows
    weights = lookup.weights
    if pooling != "sum":
        raise ValueError(
            f"feature {name!r} has weights and pooling {pooling!r}: weighted bags need pooling='sum'; "
            "otherwise give a Lookup without weights"
        )
    if weights.shape != lookup.ids.shape or weights.dtype != torch.float32:
        raise ValueError(
            f"weights of feature {name!r} must be float32 {tuple(lookup.ids.shape)}, one for each id, got "
            f"{weights.dtype} {tuple(weights.shape)}"
        )
    spread: torch.Tensor = _OverColumns.apply(weights, rows.shape[1])
    return rows * spread


class _OverColumns(torch.autograd.Function):
    """Weights (n,) as (n, dim), whose gradient is summed in a fixed order: halves onto halves.

    torch leaves the order of its own sum over a row to sizes, layout and threads.
    """

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, dim: int) -> torch.Tensor:
        return weights.unsqueeze(1).expand(-1, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        while gradient.shape[1] > 1:
            half = gradient.shape[1] // 2
            rest = gradient[:, 2 * half :]
            gradient = torch.cat([gradient[:, :half] + gradient[:, half : 2 * half], rest], 1)
        return gradient.squeeze(1), None


class BagSums(NamedTuple):
    """Rows that are summed by bag already."""

    values: torch.Tensor  # (m, dim) float32


Rows = torch.Tensor | ops.IndexedRows | BagSums


def bags_of(lengths: torch.Tensor, count: int) -> torch.Tensor:
    """(count,) int64, the bag of each id, of bags of `lengths` (m,)."""
    numbers = torch.arange(len(lengths), device=lengths.device)
    return torch.repeat_interleave(numbers, lengths, output_size=count)


def pool(rows: Rows, offsets: torch.Tensor, how: Pooling) -> torch.Tensor:
    """Sum or mean of the rows of each bag, in the order of its ids: (n, dim) -> (m, dim).

    A bag's result does not depend on the others; an empty bag gives zeros.
    """
    lengths = offsets[1:] - offsets[:-1]
    if isinstance(rows, BagSums):
        pooled = rows.values
    elif isinstance(rows, ops.IndexedRows):
        pooled = rows.pooled(bags_of(lengths, len(rows.rows)), len(lengths))
    else:
        pooled = ops.segment_sum(rows, bags_of(lengths, len(rows)), len(lengths))
    return pooled / lengths.clamp(min=1).unsqueeze(1).to(pooled.dtype) if how == "mean" else pooled


def parts(rows: Rows, lookups: Sequence[Any]) -> Sequence[Rows]:
    """The rows of each feature of a group."""
    if len(lookups) == 1:  # the gradient of a split is a copy
        return (rows,)
    if isinstance(rows, BagSums):
        return list(map(BagSums, rows.values.split([len(each.offsets) - 1 for each in lookups])))
    sizes = [each.ids.shape[0] for each in lookups]
    if isinstance(rows, ops.IndexedRows):
        return [ops.IndexedRows(rows.values, part) for part in rows.rows.split(sizes)]
    return rows.split(sizes)


def first_columns(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """The first `dim` columns (n, dim), as a table of its own would give them."""
    return rows if rows.shape[1] == dim else rows[:, :dim].contiguous()
