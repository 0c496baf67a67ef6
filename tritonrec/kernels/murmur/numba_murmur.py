# mypy: ignore-errors
"""MurmurHash3's 64-bit finaliser for numba kernels."""

import numpy as np

from ..caches import njit

_MULTIPLY_1 = np.uint64(0xFF51AFD7ED558CCD)
_MULTIPLY_2 = np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)


@njit(inline="always")
def mix64(key):
    """Mix a uint64; loops over arrays of keys vectorise."""
    h = key ^ (key >> _SHIFT)
    h *= _MULTIPLY_1
    h ^= h >> _SHIFT
    h *= _MULTIPLY_2
    return h ^ (h >> _SHIFT)
