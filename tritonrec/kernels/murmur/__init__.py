"""The 64-bit finaliser of MurmurHash3 (Appleby 2008), one twin per implementation.

A bijection of the 64-bit integers whose every output bit depends on every input bit. The house uses its
result in three disjoint ways: the *high* half chooses the owner rank (`owner_of`), the *low* bits choose the
home group in a hash table, and bits 32 and up choose the step between groups, so that the keys one rank
owns still spread over its whole table.

The function is known and runs backwards, so a client that chooses ids can choose thousands with one home, and
every insert walks past all the others. Tables whose slots nobody sees therefore mix ``key ^ SECRET``, which
no result shows: the scratch tables of `unique` and `intersect`, and the key index of an embedding table.
Owners, and tables that a caller holds (`hash_insert`), are the same in every process, and cannot.
"""

import secrets

from tritonrec.kernels.murmur.reference import mix64

__all__ = ["SECRET", "mix64"]


def draw_secret() -> int:
    """A random odd number of 63 bits: of one type and divisibility, so that Triton compiles a kernel once."""
    return 1 << 62 | secrets.randbits(61) << 1 | 1


SECRET = draw_secret()
"""Drawn anew in each process."""
