"""MurmurHash3's 64-bit finaliser: known answers, a bijection, and the same bits in numba."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from tritonrec.kernels.murmur import mix64
from tritonrec.kernels.murmur.numba_murmur import mix64 as numba_mix64

INT64 = st.integers(-(2**63), 2**63 - 1)


@njit
def _mix_all(keys):
    return numba_mix64(keys)


def unmix64(hashed):
    """Undo the finaliser step by step: the multipliers are odd, and a shift by 33 is its own inverse."""
    mask = (1 << 64) - 1
    hashed ^= hashed >> 33
    hashed = hashed * pow(0xC4CEB9FE1A85EC53, -1, 1 << 64) & mask
    hashed ^= hashed >> 33
    hashed = hashed * pow(0xFF51AFD7ED558CCD, -1, 1 << 64) & mask
    return hashed ^ hashed >> 33


def test_known_answers():
    assert mix64(0) == 0
    assert mix64(1) == 0xB456BCFC34C2CB2C


@given(INT64)
def test_is_a_bijection(key):
    assert unmix64(mix64(key)) == key % 2**64


@settings(deadline=None)  # the first example compiles
@given(st.lists(INT64, min_size=1, max_size=20))
def test_numba_gives_the_same_bits(keys):
    mixed = _mix_all(np.array(keys, np.int64).view(np.uint64))
    assert mixed.tolist() == [mix64(key) for key in keys]
