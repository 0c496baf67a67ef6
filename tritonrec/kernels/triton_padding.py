# mypy: ignore-errors
"""The count of `kernels.padding` inside a kernel."""

import triton
import triton.language as tl


@triton.jit
def num_valid(size, count_ptr):
    """How many of `size` entries hold; all of them where `count_ptr` is None."""
    # loaded by each program, since the host would have to wait for the value
    if count_ptr is not None:
        size = tl.minimum(size, tl.load(count_ptr))
    return size
