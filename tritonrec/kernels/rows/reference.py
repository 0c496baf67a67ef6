"""Rows moved and summed one at a time; in fixed point with Python's unbounded integers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tritonrec.kernels.fixed_point.errors import report_sum
from tritonrec.kernels.fixed_point.reference import round_to_fixed_point
from tritonrec.kernels.padding import first_valid
from tritonrec.kernels.row_layout import check_matrix


def gather_rows(source: torch.Tensor, rows: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """See `tritonrec.kernels.rows.gather_rows`."""
    out = source.new_zeros((rows.numel(), source.shape[1]))
    for position, row in enumerate(first_valid(rows, count).tolist()):
        out[position] = source[row]
    return out


def scatter_rows(
    destination: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    source: torch.Tensor | None,
    count: torch.Tensor | None,
) -> None:
    """See `tritonrec.kernels.rows.scatter_rows`."""
    for position, row in enumerate(first_valid(rows, count).tolist()):
        destination[row] = values[position if source is None else source[position]]


def zero_sums(values: torch.Tensor, num_segments: int, consistency: str) -> torch.Tensor:
    """(S, D) zeros to add `values` to: float32 for consistency "window", int64 for "batch"."""
    if not isinstance(values, torch.Tensor) or values.dim() != 2:
        check_matrix("values", values, torch.float32)
    check_room(num_segments, values.shape[1])
    dtype = torch.float32 if consistency == "window" else torch.int64
    return torch.zeros(num_segments, values.shape[1], dtype=dtype, device=values.device)


def check_room(num_segments: int, dim: int) -> None:
    """Refuse a number of sums that no memory has room for; torch's error would not name it."""
    if not 0 <= num_segments * dim < 1 << 60:
        raise ValueError(f"num_segments = {num_segments} rows of {dim} columns fit no memory")


def into_zeros(add: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """The `segment_sum` of an implementation, from its `segment_sum_into`."""

    def segment_sum(values, segments, num_segments, consistency, *rest) -> torch.Tensor:
        out = zero_sums(values, num_segments, consistency)
        add(out, values, segments, num_segments, consistency, *rest)
        return out

    return segment_sum


def segment_sum_into(
    out: torch.Tensor,
    values: torch.Tensor,
    segments: torch.Tensor,
    num_segments: int,
    consistency: str,
    fraction_bits: int,
    name: str,
    count: torch.Tensor | None,
    source: torch.Tensor | None,
    status: torch.Tensor | None = None,
) -> None:
    """See `tritonrec.kernels.rows.segment_sum`, with `out`."""
    if source is not None:
        values = gather_rows(values, source, count)
    code, segments_of_rows = 0, first_valid(segments, count)
    if consistency == "window":
        for row, segment in enumerate(segments_of_rows.tolist()):
            out[segment] = out[segment] + values[row]
    else:
        code = add_batch(out, values.tolist(), segments_of_rows, fraction_bits)
    report_sum(code, status, name, values, segments, fraction_bits)


segment_sum = into_zeros(segment_sum_into)


def add_batch(
    out: torch.Tensor, values: list[list[int | float]], segments: torch.Tensor, fraction_bits: int
) -> int:
    """1 + row * D + column of the first value that cannot be added, or 0."""
    for row, segment in enumerate(segments.tolist()):
        for column, value in enumerate(values[row]):
            term = value if isinstance(value, int) else round_to_fixed_point(value, fraction_bits)
            if term is None or not -(2**63) <= out[segment, column].item() + term < 2**63:
                return 1 + row * out.shape[1] + column
            out[segment, column] += term
    return 0
