# mypy: ignore-errors
"""How Triton compiles a kernel that Python launches: for what it may specialise, and for what it may not.

**Numbers of the batch.** Triton compiles a kernel anew where a number is 1, and where 16 divides it. A count
of rows or tokens is another one in each micro-batch, so a step would go on compiling for hours. Numbers of
the model (dimensions, strides, heads) are specialised: they stay, and wide accesses follow from them.

**Alignment.** Triton lays a tile out for the widest access that the addresses of its loads and stores allow,
and `tl.sum` adds in the order of that layout. So a view that is not aligned to 16 bytes, or an argument more,
changes the bits of a sum. Without that knowledge the layout follows from the shape of the tile alone, and
neighbouring threads still access neighbouring elements.
"""

import inspect

import triton

OF_THE_BATCH = {
    "num_keys", "num_table_keys", "num_slots", "num_groups", "num_rows", "full_rows", "low_rows", "rows",
    "rows_of_share", "length", "entries", "tokens", "tokens_of_share", "samples", "samples_of_share",
    "num_sequences", "num_tiles", "num_segments", "num_parts", "num_others", "num_moves", "num_blocks",
    "num_free", "num_bounds", "num_looked", "first_row", "seed", "tag", "secret", "step",
}  # fmt: skip
"""Parameters of kernels that differ from call to call of one model, or as its tables grow."""


def jit_kernel(function):
    """`triton.jit`, compiled once for any numbers of the batch."""
    return triton.jit(function, do_not_specialize=_of_the_batch(function))


def jit_for_any_alignment(function):
    """`jit_kernel`, compiled once for pointers of any alignment too: for float sums."""
    pointers = [name for name in inspect.signature(function).parameters if name.endswith("_ptr")]
    return triton.jit(
        function, do_not_specialize=_of_the_batch(function), do_not_specialize_on_alignment=pointers
    )


def _of_the_batch(function):
    return [name for name in inspect.signature(function).parameters if name in OF_THE_BATCH]
