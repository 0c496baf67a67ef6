# mypy: ignore-errors
"""Row copies to and from chunks, which lie anywhere in memory: one pass, whatever the number of chunks."""

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from ..kernels.numba_intrinsics import prefetch

AHEAD = 8
_LINE = np.int64(64)


@intrinsic
def _pointer_to(typingctx, address, like):
    """`address` as a pointer to elements of the array `like`."""
    result = types.CPointer(like.dtype)

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(result))

    return result(types.uint64, like), codegen


@njit(inline="always")
def _chunk(addresses, number, size, like):
    return carray(_pointer_to(addresses[number], like), (size,))


@njit(inline="always")
def _ask_for(addresses, row, chunk_rows, width, like):
    """Prefetch the row's first two cache lines; the hardware sees a stream after them."""
    chunk = _chunk(addresses, row // chunk_rows, chunk_rows * width, like)
    start = (row % chunk_rows) * width
    prefetch(chunk, np.uint64(start))
    second = min(_LINE // chunk.itemsize, width - 1)
    prefetch(chunk, np.uint64(start + second))


@njit(cache=True, nogil=True)
def gather(addresses, chunk_rows, width, rows, out):
    """``out[i]`` = row ``rows[i]``; `out` is flat, (K * width,)."""
    for i in range(min(AHEAD, len(rows))):
        _ask_for(addresses, rows[i], chunk_rows, width, out)
    for i in range(len(rows)):
        if i + AHEAD < len(rows):
            _ask_for(addresses, rows[i + AHEAD], chunk_rows, width, out)
        chunk = _chunk(addresses, rows[i] // chunk_rows, chunk_rows * width, out)
        start = (rows[i] % chunk_rows) * width
        for j in range(width):
            out[i * width + j] = chunk[start + j]


@njit(cache=True, nogil=True)
def scatter(addresses, chunk_rows, width, rows, values):
    """Row ``rows[i]`` = ``values[i]``; `values` is flat, (K * width,)."""
    for i in range(min(AHEAD, len(rows))):
        _ask_for(addresses, rows[i], chunk_rows, width, values)
    for i in range(len(rows)):
        if i + AHEAD < len(rows):
            _ask_for(addresses, rows[i + AHEAD], chunk_rows, width, values)
        chunk = _chunk(addresses, rows[i] // chunk_rows, chunk_rows * width, values)
        start = (rows[i] % chunk_rows) * width
        for j in range(width):
            chunk[start + j] = values[i * width + j]
