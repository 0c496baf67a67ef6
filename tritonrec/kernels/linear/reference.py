"""The products written as loops over rows and samples."""

from __future__ import annotations

import torch

from tritonrec.kernels.fixed_point.reference import round_to_fixed_point


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One row at a time, elementwise products and one sum along the row: no neighbour takes part."""
    rows = [(weight * row).sum(1) for row in x]
    out = torch.stack(rows) if rows else x.new_empty(0, weight.shape[0])
    return out if bias is None else out + bias


def add_weight_gradients(
    grid: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, seq_offsets: torch.Tensor, bits: int
) -> tuple[int, int, int, float] | None:
    """(sample, row, column, value) of the first value that cannot be added, or None."""
    for sample, (start, stop) in enumerate(
        zip(seq_offsets[:-1].tolist(), seq_offsets[1:].tolist(), strict=True)
    ):
        product = torch.zeros_like(grid, dtype=torch.float32)
        for t in range(start, stop):
            product += torch.outer(dy[t], x[t])
        for row, values in enumerate(product.tolist()):
            for column, value in enumerate(values):
                term = round_to_fixed_point(value, bits)
                if term is None or not -(2**63) <= int(grid[row, column]) + term < 2**63:
                    return sample, row, column, value
                grid[row, column] += term
    return None
