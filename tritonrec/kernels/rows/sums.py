"""The zeros that each implementation of `segment_sum` adds to."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tritonrec.kernels.row_layout import check_matrix


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
