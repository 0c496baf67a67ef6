# mypy: ignore-errors
"""Row moves: one program carries a tile of rows and columns, loads and stores and nothing else."""

import torch
import triton
import triton.language as tl

from tritonrec.kernels.triton_jit import jit_kernel
from tritonrec.kernels.triton_padding import num_valid

BLOCK_ROWS, BLOCK_DIM, NUM_WARPS = 16, 128, 4


@jit_kernel
def _move_kernel(
    source_ptr, source_rows_ptr, destination_ptr, destination_rows_ptr, num_moves, count_ptr, dim,
    source_row_stride, source_column_stride, destination_row_stride, destination_column_stride,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """``destination[destination_rows[k]] = source[source_rows[k]]``.

    The rows of the source are 0, 1, 2, ... without GATHER, those of the destination without SCATTER.
    Behind the count a gathered row is zero, and nothing is scattered.
    """
    valid = num_valid(num_moves, count_ptr)
    # int64 before the products with the strides, which pass 2**31 elements in tables of some gigabytes
    moves = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    # The lists are loaded once for a tile of rows, whatever its columns.
    if GATHER:
        # row 0 behind the count is a legal row, from which nothing is loaded
        source_row = tl.load(source_rows_ptr + moves, mask=moves < valid, other=0)
    else:
        source_row = moves
    if SCATTER:
        destination_row = tl.load(destination_rows_ptr + moves, mask=moves < valid, other=0)
    else:
        destination_row = moves
    inside = (moves < valid)[:, None] & (columns < dim)[None, :]
    source = source_row[:, None] * source_row_stride + columns[None, :] * source_column_stride
    destination = (
        destination_row[:, None] * destination_row_stride + columns[None, :] * destination_column_stride
    )
    values = tl.load(source_ptr + source, mask=inside, other=0)
    # a gather owns its output, so rows behind the count are zeros; a scatter must leave other rows alone
    if not SCATTER:
        inside = (moves < num_moves)[:, None] & (columns < dim)[None, :]
    tl.store(destination_ptr + destination, values, mask=inside)


def _move(source, source_rows, destination, destination_rows, count) -> None:
    """Rows that are None are 0, 1, 2, ..."""
    dim, rows = destination.shape[1], source_rows if destination_rows is None else destination_rows
    if rows.numel() == 0 or dim == 0:
        return
    block_dim = min(triton.next_power_of_2(dim), BLOCK_DIM)
    grid = (triton.cdiv(rows.numel(), BLOCK_ROWS), triton.cdiv(dim, block_dim))
    _move_kernel[grid](
        source, None if source_rows is None else source_rows.contiguous(), destination,
        None if destination_rows is None else destination_rows.contiguous(), rows.numel(), count, dim,
        *source.stride(), *destination.stride(), GATHER=source_rows is not None,
        SCATTER=destination_rows is not None, BLOCK_ROWS=BLOCK_ROWS, BLOCK_DIM=block_dim, num_warps=NUM_WARPS,
    )  # fmt: skip


def gather_rows(source: torch.Tensor, rows: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """See `tritonrec.ops.gather_rows`."""
    out = source.new_empty((rows.numel(), source.shape[1]))
    _move(source, rows, out, None, count)
    return out


def scatter_rows(destination, rows, values, source, count) -> None:
    """See `tritonrec.ops.scatter_rows`."""
    _move(values, source, destination, rows, count)
