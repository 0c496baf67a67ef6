# mypy: ignore-errors
"""Row moves on the CPU: one memcpy a row, whatever the dtype.

Matrices are flat arrays of bytes with a row stride (`kernels.row_layout.flat_rows`).
"""

import numpy as np

from tritonrec.kernels.numba_intrinsics import copy, prefetch

from ..caches import njit

AHEAD = 8
LINE = np.uintp(64)


@njit(cache=True, nogil=True)
def scatter_rows(out, out_stride, rows, values, value_stride, source, width):
    """``out[rows[i]] = values[source[i]]``, rows of `width` bytes."""
    count = rows.shape[0]
    for i in range(count):
        if i + AHEAD < count:
            from_ahead = np.uintp(source[i + AHEAD]) * value_stride
            to_ahead = np.uintp(rows[i + AHEAD]) * out_stride
            for d in range(np.uintp(0), width, LINE):
                prefetch(values, from_ahead + d)
                prefetch(out, to_ahead + d)
        copy(out, np.uintp(rows[i]) * out_stride, values, np.uintp(source[i]) * value_stride, width)
