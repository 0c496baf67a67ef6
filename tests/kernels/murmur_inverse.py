"""MurmurHash3's 64-bit finaliser backwards: keys with any hash one likes, so collisions need no search."""

MASK = 2**64 - 1
FIRST = pow(0xFF51AFD7ED558CCD, -1, 2**64)
SECOND = pow(0xC4CEB9FE1A85EC53, -1, 2**64)


def key_with_hash(hashed: int) -> int:
    """The signed 64-bit key whose `mix64` is `hashed`; shifts by 33 of 64 bits undo themselves."""
    h = hashed ^ (hashed >> 33)
    h = h * SECOND & MASK
    h ^= h >> 33
    h = h * FIRST & MASK
    h ^= h >> 33
    return h - 2**64 if h >= 2**63 else h
