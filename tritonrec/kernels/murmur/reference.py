"""MurmurHash3's 64-bit finaliser on Python integers, to be compared with Appleby's C line by line, and on
arrays of uint64.
"""

_MASK = (1 << 64) - 1


def mix64(key: int) -> int:
    """Mix a signed or unsigned 64-bit `key`; the result is unsigned (``fmix64`` in MurmurHash3.cpp)."""
    h = key & _MASK
    h ^= h >> 33
    h = h * 0xFF51AFD7ED558CCD & _MASK
    h ^= h >> 33
    h = h * 0xC4CEB9FE1A85EC53 & _MASK
    h ^= h >> 33
    return h
