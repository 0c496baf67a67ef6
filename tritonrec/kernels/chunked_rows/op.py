"""Copies of rows that lie in chunks of memory: gather and scatter by location, in one pass.

A location below `LOW` is a row of the float32 chunks. A location from `LOW` on is a row of the 16-bit chunks:
`dim` float16 weights, then bfloat16 state. With chunks of 3 rows::

    location     0  1  2 | 3  4  5 | 6  7      LOW  LOW+1  LOW+2 | LOW+3
    chunk        full[0]   full[1]   full[2]   low[0]              low[1]

Chunks are addressed by their pointers, so they never move while others are added. Widening is exact, payloads
of NaN included. Narrowing cuts bits off: it is exact for the rows that `fits` names, and gives the same bits
in every implementation for the others.

These are functions for `tritonrec.embedding`, no registered ops: torch cannot see what is behind an address.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.dispatch import Impl, implementation, imported, on_host

LOW = 1 << 30
"""The bit of a location that tells the 16-bit chunks from the float32 ones."""

_MODULES = {"reference": "reference", "cpu": "numba_chunked_rows", "triton": "triton_chunked_rows"}


class Chunks(NamedTuple):
    """Where the rows of one table lie.

    full, low: (chunks,) int64, the tables that `addresses` makes of the float32 and of the 16-bit chunks.
    full_rows, low_rows: rows in use, at most `LOW` each; a location beyond them is refused.
    chunk_rows: rows of one chunk. dim, width: weights and values of one row.
    """

    full: torch.Tensor
    low: torch.Tensor
    full_rows: int
    low_rows: int
    chunk_rows: int
    dim: int
    width: int


def read_rows(
    chunks: Chunks, locations: torch.Tensor, out: torch.Tensor | None = None, *, impl: Impl = "auto"
) -> torch.Tensor:
    """Copies of the rows at `locations`.

    Args:
        locations: (K,) int64; none is read where one is negative.
        out: (K, width) float32, contiguous; rows of negative locations keep what it has. Without it a new
            tensor, which has anything there.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        `out`, or the new tensor.

    Raises:
        IndexError: a location is outside the chunks; on an accelerator, where nothing waits for the device,
            it is treated like a negative one.
    """
    if out is None:
        out = torch.empty(locations.shape[0], chunks.width, dtype=torch.float32, device=locations.device)
    _copy("read_rows", chunks, locations, out, "out", impl)
    return out


def write_rows(chunks: Chunks, locations: torch.Tensor, values: torch.Tensor, *, impl: Impl = "auto") -> None:
    """Overwrite the rows at `locations` with `values`.

    Args:
        locations: (K,) int64; those that are not negative are distinct (not checked).
        values: (K, width) float32, contiguous; rows of negative locations are skipped. Rows of the 16-bit
            chunks lose the bits that `fits` finds.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Raises:
        IndexError: a location is outside the chunks, nothing is written; on an accelerator that row is
            skipped.
    """
    _copy("write_rows", chunks, locations, values, "values", impl)


def fits(values: torch.Tensor, dim: int, *, impl: Impl = "auto") -> torch.Tensor:
    """(K,) bool, which rows of `values` (K, width) float32, contiguous, 16 bits a value hold exactly."""
    _check_rows("values", values, values.shape)
    exact = torch.empty(len(values), dtype=torch.bool, device=values.device)
    _module(impl, values).fits(values, dim, exact)
    return exact


def _copy(
    name: str, chunks: Chunks, locations: torch.Tensor, rows: torch.Tensor, name_of_rows: str, impl: Impl
) -> None:
    if locations.dim() != 1 or locations.dtype != torch.int64:
        raise ValueError(f"locations must be (K,) int64, got {tuple(locations.shape)} {locations.dtype}")
    _check_rows(name_of_rows, rows, (locations.shape[0], chunks.width))
    module, locations = _module(impl, locations), locations.contiguous()
    if on_host(locations):
        from tritonrec.kernels.chunked_rows.numba_chunked_rows import first_outside

        bad = first_outside(locations.numpy(), chunks.full_rows, chunks.low_rows)
        if bad >= 0:
            raise IndexError(f"no row lies at location {int(locations[bad])}")
    getattr(module, name)(chunks, locations, rows)


def _check_rows(name: str, rows: torch.Tensor, shape: tuple[int, ...]) -> None:
    check_shape(name, rows, shape, torch.float32)
    if rows.dim() != 2 or not rows.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous rows, got {tuple(rows.shape)} of strides {rows.stride()}"
        )


def _module(impl: Impl, tensor: torch.Tensor) -> Any:
    """The module of the implementation that runs, imported when it does."""
    return imported(f"tritonrec.kernels.chunked_rows.{_MODULES[implementation(impl, tensor)]}")
