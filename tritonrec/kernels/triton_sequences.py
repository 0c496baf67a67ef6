# mypy: ignore-errors
"""What Triton kernels over jagged (L, H, D) tensors share: where a tile lies, and its rows.

Strides are single arguments: the Triton of triton-ascend takes no tuples.
"""

import triton
import triton.language as tl


@triton.jit
def locate(tile, num_sequences, num_heads, offsets_ptr):
    """Block, head, sequence, first token and length of a tile; blocks change slowest.

    A token's place among all is int64, its place in a sequence int32.
    """
    # one division after the other: the product of both may pass 2**31
    block = tile // num_heads // num_sequences
    sequence = tile // num_heads % num_sequences
    begin = tl.load(offsets_ptr + sequence).to(tl.int64)
    length = (tl.load(offsets_ptr + sequence + 1) - begin).to(tl.int32)
    return block.to(tl.int32), tile % num_heads, sequence, begin, length


@triton.jit
def tile_of(ptr, row_stride, head_stride, begin, head, row, length, dim, BLOCK_D: tl.constexpr, least=None):
    """Addresses (rows, BLOCK_D) of one head, and which of them exist: of places [least, length)."""
    feature = tl.arange(0, BLOCK_D)
    # begin is int64, and so is the product with the stride; features lie side by side
    address = ptr + head * head_stride + (begin + row)[:, None] * row_stride + feature[None, :]
    own = row < length
    if least is not None:
        own = own & (row >= least)
    return address, own[:, None] & (feature < dim)[None, :]


@triton.jit
def load_rows(ptr, row_stride, head_stride, begin, head, row, length, dim, BLOCK_D: tl.constexpr, least=None):
    """Rows of a sequence, zero where there is none."""
    address, exists = tile_of(ptr, row_stride, head_stride, begin, head, row, length, dim, BLOCK_D, least)
    return tl.load(address, mask=exists, other=0.0)


@triton.jit
def store_rows(
    value, ptr, row_stride, head_stride, begin, head, row, length, dim, BLOCK_D: tl.constexpr, least=None
):  # fmt: skip
    address, exists = tile_of(ptr, row_stride, head_stride, begin, head, row, length, dim, BLOCK_D, least)
    tl.store(address, value.to(ptr.dtype.element_ty), mask=exists)
