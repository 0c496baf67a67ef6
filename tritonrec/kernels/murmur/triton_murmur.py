# mypy: ignore-errors
"""MurmurHash3's 64-bit finaliser for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def mix64(key):
    """Mix an int64 tensor; the result is the hash's bits as int64, so a right shift extends its sign."""
    # unsigned: right shifts bring in zeros, and the constants exceed int64
    h = key.to(tl.uint64, bitcast=True)
    h ^= h >> 33
    h *= 0xFF51AFD7ED558CCD
    h ^= h >> 33
    h *= 0xC4CEB9FE1A85EC53
    h ^= h >> 33
    return h.to(tl.int64, bitcast=True)
