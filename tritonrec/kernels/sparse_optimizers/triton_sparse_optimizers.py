"""Fused sparse updates in Triton: one program per tile of rows, correctly rounded division and square root.

Launched without FMA contraction (`enable_fp_fusion=False`), so a kernel rounds where the reference does.
Indices are distinct, so programs never meet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonrec.kernels.row_layout import contiguous_rows
from tritonrec.kernels.sparse_optimizers.reference import adam_scalars
from tritonrec.kernels.triton_padding import num_valid

ELEMENTS, BLOCK_D, NUM_WARPS = 1024, 128, 4
ROWS_OF_ADAGRAD = 32


@triton.jit
def tile_of(indices_ptr, num_rows, count_ptr, dim, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Occurrences, table rows, columns (int64) and mask of this program's tile, false behind the count."""
    occurrence = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    inside = occurrence < num_valid(num_rows, count_ptr)
    # row 0 behind the count is a legal row, which the mask leaves alone
    row = tl.load(indices_ptr + occurrence, mask=inside, other=0)
    return occurrence, row, column, inside & (column < dim)


@triton.jit
def sgd_kernel(
    weight_ptr,
    weight_stride,
    indices_ptr,
    grad_ptr,
    grad_stride,
    num_rows,
    count_ptr,
    dim,
    lr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """w -= lr * g."""
    occurrence, row, column, mask = tile_of(indices_ptr, num_rows, count_ptr, dim, ROWS, BLOCK_D)
    gradient = tl.load(grad_ptr + occurrence * grad_stride + column, mask=mask, other=0.0)
    place = weight_ptr + row * weight_stride + column
    tl.store(place, tl.load(place, mask=mask, other=0.0) - lr * gradient, mask=mask)


@triton.jit
def add_halves(lanes, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Lanes (ROWS, 2 * HALF) to (ROWS, HALF): lane j plus lane j + HALF, an order no backend may change."""
    low, high = tl.split(tl.permute(tl.reshape(lanes, (ROWS, 2, HALF)), (0, 2, 1)))
    return low + high


@triton.jit
def rowwise_adagrad_kernel(
    weight_ptr,
    weight_stride,
    state_ptr,
    state_stride,
    indices_ptr,
    grad_ptr,
    grad_stride,
    num_rows,
    count_ptr,
    dim,
    lr,
    eps,
    ROWS: tl.constexpr,
):
    """state += mean(g * g) of a row; w -= lr / (sqrt(state) + eps) * g."""
    # the grid has no second axis, so the tile's columns are the 16 lanes
    occurrence, row, lane, _ = tile_of(indices_ptr, num_rows, count_ptr, dim, ROWS, 16)
    inside = occurrence < num_valid(num_rows, count_ptr)
    # 16 lanes for every dimension and device: another number would change the order of the sum
    lanes = tl.zeros((ROWS, 16), tl.float32)
    for start in range(tl.full((), 0, tl.int64), dim, 16):
        mask = inside & (start + lane < dim)
        gradient = tl.load(grad_ptr + occurrence * grad_stride + start + lane, mask=mask, other=0.0)
        lanes += gradient * gradient
    # a fixed tree, since tl.sum may add lanes in another order on another backend
    lanes = add_halves(lanes, ROWS, 8)
    lanes = add_halves(lanes, ROWS, 4)
    lanes = add_halves(lanes, ROWS, 2)
    # div_rn and sqrt_rn round correctly; a plain division may be an approximation
    mean = tl.div_rn(add_halves(lanes, ROWS, 1), tl.full((ROWS, 1), 0.0, tl.float32) + dim)
    total = tl.load(state_ptr + row * state_stride, mask=inside, other=0.0) + mean
    # several threads may load one state, for the store and for the division: none may load it changed
    tl.debug_barrier()
    tl.store(state_ptr + row * state_stride, total, mask=inside)
    step = tl.div_rn(tl.full((ROWS, 1), 0.0, tl.float32) + lr, tl.sqrt_rn(total) + eps)
    # the gradient is read again, since a row may be wider than the registers hold
    for start in range(tl.full((), 0, tl.int64), dim, 16):
        mask = inside & (start + lane < dim)
        gradient = tl.load(grad_ptr + occurrence * grad_stride + start + lane, mask=mask, other=0.0)
        place = weight_ptr + row * weight_stride + start + lane
        tl.store(place, tl.load(place, mask=mask, other=0.0) - step * gradient, mask=mask)


@triton.jit
def adam_kernel(
    weight_ptr,
    weight_stride,
    exp_avg_ptr,
    exp_avg_stride,
    exp_avg_sq_ptr,
    exp_avg_sq_stride,
    indices_ptr,
    grad_ptr,
    grad_stride,
    num_rows,
    count_ptr,
    dim,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    step_size,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """m = beta1 m + rest1 g; v = beta2 v + rest2 g g; w -= step_size m / (sqrt(v) + eps); rest = 1 - beta."""
    occurrence, row, column, mask = tile_of(indices_ptr, num_rows, count_ptr, dim, ROWS, BLOCK_D)
    gradient = tl.load(grad_ptr + occurrence * grad_stride + column, mask=mask, other=0.0)
    mean_place = exp_avg_ptr + row * exp_avg_stride + column
    square_place = exp_avg_sq_ptr + row * exp_avg_sq_stride + column
    place = weight_ptr + row * weight_stride + column
    mean = beta1 * tl.load(mean_place, mask=mask, other=0.0) + rest1 * gradient
    square = beta2 * tl.load(square_place, mask=mask, other=0.0) + rest2 * (gradient * gradient)
    # A masked element would divide 0 by 0 where eps is 0; its result is never stored.
    change = tl.div_rn(step_size * mean, tl.sqrt_rn(square) + eps)
    tl.store(mean_place, mean, mask=mask)
    tl.store(square_place, square, mask=mask)
    tl.store(place, tl.load(place, mask=mask, other=0.0) - change, mask=mask)


def _tile(grad: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and tile."""
    num_rows, dim = grad.shape
    block = min(BLOCK_D, triton.next_power_of_2(dim))
    rows = ELEMENTS // block
    tile = {"ROWS": rows, "BLOCK_D": block, "num_warps": NUM_WARPS}
    return (triton.cdiv(num_rows, rows), triton.cdiv(dim, block)), tile


def sparse_sgd(
    weight: torch.Tensor, indices: torch.Tensor, grad: torch.Tensor, lr: float, count: torch.Tensor | None
) -> None:
    """See `tritonrec.kernels.sparse_optimizers.sparse_sgd`."""
    if grad.numel() == 0:
        return
    grad, (grid, tile) = contiguous_rows(grad), _tile(grad)
    sgd_kernel[grid](
        weight,
        weight.stride(0),
        indices.contiguous(),
        grad,
        grad.stride(0),
        grad.shape[0],
        count,
        grad.shape[1],
        lr,
        **tile,
        enable_fp_fusion=False,
    )


def sparse_rowwise_adagrad(
    weight: torch.Tensor,
    state: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    eps: float,
    count: torch.Tensor | None,
) -> None:
    """See `tritonrec.kernels.sparse_optimizers.sparse_rowwise_adagrad`."""
    if grad.numel() == 0:
        return
    grad = contiguous_rows(grad)
    rowwise_adagrad_kernel[(triton.cdiv(grad.shape[0], ROWS_OF_ADAGRAD),)](
        weight,
        weight.stride(0),
        state,
        state.stride(0),
        indices.contiguous(),
        grad,
        grad.stride(0),
        grad.shape[0],
        count,
        grad.shape[1],
        lr,
        eps,
        ROWS=ROWS_OF_ADAGRAD,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


def sparse_adam(
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    count: torch.Tensor | None,
) -> None:
    """See `tritonrec.kernels.sparse_optimizers.sparse_adam`."""
    if grad.numel() == 0:
        return
    grad, (grid, tile) = contiguous_rows(grad), _tile(grad)
    adam_kernel[grid](
        weight,
        weight.stride(0),
        exp_avg,
        exp_avg.stride(0),
        exp_avg_sq,
        exp_avg_sq.stride(0),
        indices.contiguous(),
        grad,
        grad.stride(0),
        grad.shape[0],
        count,
        grad.shape[1],
        *map(float, adam_scalars(lr, beta1, beta2, eps, step)),
        **tile,
        enable_fp_fusion=False,
    )
