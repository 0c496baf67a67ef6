# mypy: ignore-errors
"""The loops of checksums on the CPU."""

import numpy as np
from numba import carray

from tritonrec.kernels.numba_addresses import pointer

from ..caches import njit


@njit(cache=True, nogil=True)
def add_row(words, weights):
    """``sum(words[j] * weights[j])`` in int64, which wraps; words and weights are int32."""
    total = 0
    for j in range(len(words)):
        total += words[j] * weights[j]
    return total


@njit(cache=True, nogil=True)
def add_words(words, weights, sums):
    """The sums of all rows."""
    for i in range(len(words)):
        sums[i] = add_row(words[i], weights)


@njit(cache=True, nogil=True)
def write_rows(words, weights, handles, sums):
    """``sums[handles[i]]`` is the sum of row i."""
    for i in range(len(words)):
        if handles[i] >= 0:
            sums[handles[i]] = add_row(words[i], weights)


@njit(cache=True, nogil=True)
def first_other(words, weights, handles, sums, skipped):
    """The first row whose sum is not ``sums[handles[i]]``; -1: there is none."""
    left_out = np.zeros(len(handles), dtype=np.bool_)
    for position in skipped:
        if position >= 0:
            left_out[position] = True
    for i in range(len(words)):
        if handles[i] >= 0 and not left_out[i] and add_row(words[i], weights) != sums[handles[i]]:
            return i
    return -1


@njit(cache=True, nogil=True)
def add_chunks(words, rest, of_words, of_chunks):
    """`checksum` of int32 words and of up to three bytes behind them."""
    size, total, last = len(of_words), 0, 0
    for i in range(len(rest)):
        last |= rest[i] << 8 * i
    for chunk in range(len(of_chunks)):
        first, of_chunk = chunk * size, 0
        for j in range(min(size, len(words) - first)):
            of_chunk += words[first + j] * of_words[j]
        if 0 <= len(words) - first < size:
            of_chunk += last * of_words[len(words) - first]
        total += of_chunk * of_chunks[chunk]
    return total + 4 * len(words) + len(rest)


@njit(cache=True, nogil=True)
def add_bits(table, sums):
    """The sum of each array's int32 words; `table` (P, 2) has addresses and numbers of words."""
    for i in range(len(table)):
        words, total = carray(pointer(table[i, 0]), (table[i, 1],), np.int32), 0
        for word in words:
            total += word
        sums[i] = total
