# mypy: ignore-errors
"""Dot products of pairs on the CPU: small products of matrices, sample by sample, all of them in the cache.

Forward needs half of a product, the triangle below its diagonal, so four rows at a time stop at their last
column. The other factor lies transposed, its rows padded to whole vector registers.
"""

import numpy as np
import torch

from tritonrec.kernels.numba_matmul import add_products
from tritonrec.kernels.row_layout import flat
from tritonrec.kernels.workers import over_ranges

from ..caches import njit

U = np.uintp
ONE, FOUR, SIXTEEN = U(1), U(4), U(16)


@njit(cache=True, nogil=True)
def forward(x, out, start, stop, count, dim):
    """Samples [start, stop) of flat x (B, V, D) into out (B, P)."""
    width = (count + SIXTEEN - ONE) // SIXTEEN * SIXTEEN
    across = np.zeros(dim * width, np.float32)
    tile = np.empty(FOUR * width, np.float32)
    to = start * (count * (count - ONE) // U(2))
    for first in range(start * count * dim, stop * count * dim, count * dim):
        for v in range(count):
            for k in range(dim):
                across[k * width + v] = x[first + v * dim + k]
        for v in range(U(0), count, FOUR):
            rows = min(FOUR, count - v)
            columns = (v + rows + SIXTEEN - ONE) // SIXTEEN * SIXTEEN
            tile[:] = 0
            add_products(
                tile, U(0), width, x, first + v * dim, dim, ONE, across, U(0), width, rows, dim, columns
            )
            for r in range(rows):
                for c in range(v + r):
                    out[to + c] = tile[r * width + c]
                to += v + r


@njit(cache=True, nogil=True)
def backward(dy, x, dx, start, stop, count, dim):
    """Samples [start, stop) of flat dy (B, P) and x (B, V, D) into dx (B, V, D)."""
    square = np.zeros(count * count, np.float32)  # its diagonal stays zero
    at = start * (count * (count - ONE) // U(2))
    for first in range(start * count * dim, stop * count * dim, count * dim):
        for v in range(count):
            for c in range(v):
                square[v * count + c] = dy[at + c]
                square[c * count + v] = dy[at + c]
            at += v
        dx[first : first + count * dim] = 0
        add_products(dx, first, dim, square, U(0), count, ONE, x, first, dim, count, count, dim)


def dot_interaction(vectors: torch.Tensor) -> torch.Tensor:
    """See `tritonrec.kernels.dot_interaction.op.dot_interaction`."""
    samples, count, dim = vectors.shape
    out = vectors.new_zeros(samples, count * (count - 1) // 2)  # zeros where D is 0
    if out.numel() and dim:
        _run(forward, vectors, flat(vectors), flat(out))
    return out


def dot_interaction_backward(dy: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """(B, V, D)."""
    out = torch.zeros_like(vectors, memory_format=torch.contiguous_format)
    if out.numel():
        _run(backward, vectors, flat(dy), flat(vectors), flat(out))
    return out


def _run(kernel, vectors: torch.Tensor, *arrays: np.ndarray) -> None:
    samples, count, dim = vectors.shape

    def run(start: int, stop: int) -> None:
        kernel(*arrays, U(start), U(stop), U(count), U(dim))

    over_ranges(run, samples, 2.0 * count * count * vectors.numel() / max(count, 1))
