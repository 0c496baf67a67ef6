# mypy: ignore-errors
"""Row moves on the CPU: gathers and small scatters by torch, others one memcpy a row, of any dtype."""

import numpy as np
import torch

from tritonrec.kernels.numba_intrinsics import copy, prefetch
from tritonrec.kernels.padding import first_valid, pad
from tritonrec.kernels.row_layout import flat_rows
from tritonrec.kernels.workers import over_ranges

from ..caches import njit

# Bytes from which the loop beats torch's index_copy_: at 200 rows of 256 bytes it takes 1.7 of the time,
# at 1,000 rows 0.8, at 5,000 rows 0.4 (one Zen 4 thread, rows at random out of 60,000).
SMALL = 1 << 18
COMMON = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32}
AHEAD = 8
LINE = np.uintp(64)


def gather_rows(source: torch.Tensor, rows: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """See `tritonrec.ops.gather_rows`."""
    return pad(torch.index_select(source, 0, first_valid(rows, count)), rows.numel(), 0)


def scatter_rows(destination, rows, values, source, count) -> None:
    """See `tritonrec.ops.scatter_rows`."""
    rows = first_valid(rows, count)
    if source is None:
        values = values[: rows.numel()]
    else:
        source = source[: rows.numel()]
    if not destination.stride(1) == values.stride(1) == 1:
        destination.index_copy_(0, rows, values if source is None else values.index_select(0, source))
        return
    if source is None:
        if values.nbytes < SMALL and values.dtype in COMMON:  # torch has no kernel for rarer types
            destination.index_copy_(0, rows, values)
            return
        source = torch.arange(rows.numel(), device="cpu")
    to, places = flat_rows(destination.view(torch.uint8)), rows.contiguous().numpy()
    of, taken = flat_rows(values.view(torch.uint8)), source.contiguous().numpy()
    width = values.element_size() * values.shape[1]

    def run(start: int, stop: int) -> None:
        _scatter(*to, places[start:stop], *of, taken[start:stop], np.uintp(width))

    over_ranges(run, len(places), len(places) * width)


@njit(cache=True, nogil=True)
def _scatter(out, out_stride, rows, values, value_stride, source, width):
    """``out[rows[i]] = values[source[i]]``, rows of `width` bytes, in flat arrays with a row stride."""
    count = rows.shape[0]
    for i in range(count):
        if i + AHEAD < count:
            from_ahead = np.uintp(source[i + AHEAD]) * value_stride
            to_ahead = np.uintp(rows[i + AHEAD]) * out_stride
            for d in range(np.uintp(0), width, LINE):
                prefetch(values, from_ahead + d)
                prefetch(out, to_ahead + d)
        copy(out, np.uintp(rows[i]) * out_stride, values, np.uintp(source[i]) * value_stride, width)
