# mypy: ignore-errors
"""The relative bias of HSTU attention on the CPU, one row of scores at a time.

    bias(i, j) = pos_weights[base + sign * (j - i)] + ts_weights[bucket(t_i - t_j)]

A table that is not there is empty. Gradients of the tables add float32 terms in float64.
"""

import numpy as np

from tritonrec.kernels.numba_sequences import log2_of_difference

from ..caches import njit

I = np.int64
U = np.uintp


@njit(cache=True, nogil=True)
def add_bias(x, at, row, start, stop, pos, base, sign, ts, row_time, times, begin, factor):
    """``x[at + j] += factor * bias(row, j)`` for columns [start, stop)."""
    most = I(pos.shape[0]) - 1
    if most >= 0:
        for j in range(start, stop):
            x[at + U(j)] += factor * pos[U(max(I(0), min(base + sign * (j - row), most)))]
    last = I(ts.shape[0]) - 1
    if last >= 0:
        for j in range(start, stop):
            x[at + U(j)] += factor * ts[U(min(log2_of_difference(row_time, times[U(begin + j)]), last))]


@njit(cache=True, nogil=True)
def add_bias_gradient(
    ds, at, row, start, stop, pos_sums, base, sign, ts_sums, row_time, times, begin
):  # fmt: skip
    """Add a row's terms for columns [start, stop) to the sums of the table entries that they used."""
    most = I(pos_sums.shape[0]) - 1
    if most >= 0:
        for j in range(start, stop):
            place = U(max(I(0), min(base + sign * (j - row), most)))
            pos_sums[place] += np.float64(ds[at + U(j)])
    last = I(ts_sums.shape[0]) - 1
    if last >= 0:
        for j in range(start, stop):
            place = U(min(log2_of_difference(row_time, times[U(begin + j)]), last))
            ts_sums[place] += np.float64(ds[at + U(j)])
