"""The key structure of a dynamic embedding table."""

from tritonrec.kernels.hash_table.errors import HashTableFullError
from tritonrec.kernels.hash_table.op import (
    check_inserted,
    hash_assign,
    hash_erase,
    hash_find,
    hash_grow,
    hash_insert,
)

__all__ = [
    "HashTableFullError",
    "check_inserted",
    "hash_assign",
    "hash_erase",
    "hash_find",
    "hash_grow",
    "hash_insert",
]
