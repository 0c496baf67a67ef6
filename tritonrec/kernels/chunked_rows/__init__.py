"""Copies of rows that lie in chunks of host memory: gather and scatter by location, in one pass.

A location below `LOW` is a row of the float32 chunks. A location from `LOW` on is a row of the 16-bit chunks:
`dim` float16 weights, then bfloat16 state. Widening is exact; narrowing is exact for the rows that `fits`
names. CPU only: the chunks are addressed by their pointers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tritonrec.kernels.chunked_rows import numba_chunked_rows as kernels

LOW = 1 << 30
"""The bit of a location that tells the 16-bit chunks from the float32 ones."""

_WORDS = np.empty(0, np.int16)  # tells the kernels the type of a 16-bit value


class Chunks(NamedTuple):
    """Where the rows of one table lie.

    full, low: (chunks,) uint64, the addresses of the float32 and of the 16-bit chunks.
    full_rows, low_rows: rows in use; a location beyond them is refused.
    chunk_rows: rows of one chunk. dim, width: weights and values of one row.
    """

    full: np.ndarray
    low: np.ndarray
    full_rows: int
    low_rows: int
    chunk_rows: int
    dim: int
    width: int


def read_rows(chunks: Chunks, locations: torch.Tensor) -> torch.Tensor:
    """Copies (K, width) float32 of the rows at `locations` (K,) int64; anything where that is negative.

    Raises IndexError for a location outside the chunks.
    """
    out = torch.empty(len(locations), chunks.width, dtype=torch.float32)
    _copy(kernels.read_rows, chunks, locations, out)
    return out


def write_rows(chunks: Chunks, locations: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite the rows at `locations` (K,) int64, distinct, with `values` (K, width) float32, contiguous.

    Negative locations are skipped. Rows of the 16-bit chunks lose the bits that `fits` finds.

    Raises IndexError for a location outside the chunks; nothing is written.
    """
    _copy(kernels.write_rows, chunks, locations, values)


def fits(values: torch.Tensor, dim: int) -> torch.Tensor:
    """(K,) bool, which rows of `values` (K, width) float32, contiguous, 16 bits a value hold exactly."""
    exact = torch.empty(len(values), dtype=torch.bool)
    kernels.fits(values.view(-1).numpy(), dim, values.shape[1], exact.numpy())
    return exact


def _copy(kernel, chunks: Chunks, locations: torch.Tensor, values: torch.Tensor) -> None:
    rows = locations.contiguous().numpy()
    bad = kernels.first_outside(rows, chunks.full_rows, chunks.low_rows)
    if bad >= 0:
        raise IndexError(f"no row lies at location {int(rows[bad])}")
    kernel(
        chunks.full, chunks.low, chunks.chunk_rows, chunks.dim, chunks.width, rows,
        values.view(-1).numpy(), _WORDS,
    )  # fmt: skip
