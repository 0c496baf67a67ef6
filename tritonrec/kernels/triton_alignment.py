# mypy: ignore-errors
"""Kernels whose float sums must not depend on where their tensors begin in memory.

Triton lays a tile out for the widest access that the addresses of its loads and stores allow, and `tl.sum`
adds in the order of that layout. So a view that is not aligned to 16 bytes, or an argument more, changes the
bits of a sum. Without that knowledge the layout follows from the shape of the tile alone, and neighbouring
threads still access neighbouring elements.
"""

import inspect

import triton


def jit_for_any_alignment(function):
    """`triton.jit`, compiled once for pointers of any alignment."""
    pointers = [name for name in inspect.signature(function).parameters if name.endswith("_ptr")]
    return triton.jit(function, do_not_specialize_on_alignment=pointers)
