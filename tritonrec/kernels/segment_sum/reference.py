"""Segment sums, one row at a time; on the grid in Python's unbounded integers."""

from __future__ import annotations

import torch

from tritonrec.kernels.fixed_point.reference import round_to_fixed_point


def add_window(out: torch.Tensor, values: torch.Tensor, segments: torch.Tensor) -> None:
    for row, segment in enumerate(segments.tolist()):
        out[segment] = out[segment] + values[row]


def add_batch(out: torch.Tensor, values: torch.Tensor, segments: torch.Tensor, bits: int) -> int:
    """Position (row * D + column) of the first value that cannot be added, or -1."""
    for row, segment in enumerate(segments.tolist()):
        for column, value in enumerate(values[row].tolist()):
            term = value if isinstance(value, int) else round_to_fixed_point(value, bits)
            if term is None or not -(2**63) <= out[segment, column].item() + term < 2**63:
                return row * values.shape[1] + column
            out[segment, column] += term
    return -1
