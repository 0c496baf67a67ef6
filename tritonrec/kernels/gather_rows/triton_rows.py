# mypy: ignore-errors
"""Row moves: one program carries a tile of rows and columns, loads and stores and nothing else."""

import torch
import triton
import triton.language as tl

from tritonrec.kernels import tuned
from tritonrec.kernels.triton_padding import held


@triton.jit
def _move_kernel(
    source_ptr,
    source_rows_ptr,
    destination_ptr,
    destination_rows_ptr,
    num_moves,
    count_ptr,
    dim,
    source_row_stride,
    source_column_stride,
    destination_row_stride,
    destination_column_stride,
    GATHER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """``destination[k] = source[rows[k]]`` where GATHER, else ``destination[rows[k]] = source[k]``.

    Behind the count a gathered row is zero, and nothing is scattered.
    """
    num_held = held(num_moves, count_ptr)
    moves = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    if GATHER:
        source_row = tl.load(source_rows_ptr + moves, mask=moves < num_held, other=0)
        destination_row = moves
    else:
        source_row = moves
        destination_row = tl.load(destination_rows_ptr + moves, mask=moves < num_held, other=0)
    inside = (moves < num_held)[:, None] & (columns < dim)[None, :]
    source = source_row[:, None] * source_row_stride + columns[None, :] * source_column_stride
    destination = (
        destination_row[:, None] * destination_row_stride + columns[None, :] * destination_column_stride
    )
    values = tl.load(source_ptr + source, mask=inside, other=0)
    if GATHER:
        inside = (moves < num_moves)[:, None] & (columns < dim)[None, :]
    tl.store(destination_ptr + destination, values, mask=inside)


def _move(source, destination, rows, count, gather: bool) -> None:
    dim = destination.shape[1]
    if rows.numel() == 0 or dim == 0:
        return
    block_dim = min(triton.next_power_of_2(dim), 128)
    config = tuned.config("gather_rows", tuned.row_class(dim, most=128), rows.device)
    grid = (triton.cdiv(rows.numel(), config["BLOCK_ROWS"]), triton.cdiv(dim, block_dim))
    _move_kernel[grid](
        source,
        rows,
        destination,
        rows,
        rows.numel(),
        count,
        dim,
        *source.stride(),
        *destination.stride(),
        GATHER=gather,
        BLOCK_DIM=block_dim,
        **config,
    )


def gather_rows(source: torch.Tensor, rows: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """See `tritonrec.kernels.gather_rows.gather_rows`."""
    out = source.new_empty((rows.numel(), source.shape[1]))
    _move(source, out, rows.contiguous(), count, gather=True)
    return out


def scatter_rows(
    destination: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, count: torch.Tensor | None
) -> None:
    """See `tritonrec.kernels.gather_rows.scatter_rows`."""
    _move(values, destination, rows.contiguous(), count, gather=False)
