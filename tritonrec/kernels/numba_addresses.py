# mypy: ignore-errors
"""Arrays of a kernel by their addresses: numba unpacks an array for as much time as a small loop takes.

A kernel with many arguments takes one int64 array of addresses and sizes. The caller that fills it keeps
the memory behind it, and has checked that it is as large as the kernel takes it to be.
"""

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from .caches import njit


@intrinsic
def pointer(typingctx, address):
    """The address as a pointer, for `numba.carray`."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@njit(cache=True, nogil=True)
def floats(address, count):
    """A flat float32 array of `count` elements."""
    return carray(pointer(address), (count,), np.float32)


@njit(cache=True, nogil=True)
def integers(address, count):
    """A flat int64 array of `count` elements."""
    return carray(pointer(address), (count,), np.int64)


@njit(cache=True, nogil=True)
def booleans(address, count):
    """A flat array of `count` booleans."""
    return carray(pointer(address), (count,), np.bool_)
