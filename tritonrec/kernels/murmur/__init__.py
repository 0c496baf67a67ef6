"""The 64-bit finaliser of MurmurHash3 (Appleby 2008), one twin per implementation.

A bijection of the 64-bit integers whose every output bit depends on every input bit. The house uses its
result in three disjoint ways: the *high* half chooses the owner rank (`owner_of`), the *low* bits choose the
home group in a hash table, and bits 32 and up choose the step between groups, so that the keys one rank
owns still spread over its whole table.
"""

from tritonrec.kernels.murmur.reference import mix64

__all__ = ["mix64"]
