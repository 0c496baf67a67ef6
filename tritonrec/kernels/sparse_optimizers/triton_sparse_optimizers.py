"""Fused sparse updates in Triton: one program per tile of rows, correctly rounded division and square root.

Launched without FMA contraction (`enable_fp_fusion=False`), so a kernel rounds where the reference does.
Indices are distinct, so programs never meet. A rule is a constant, and a state that it lacks is None.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tritonrec.kernels.row_layout import contiguous_rows
from tritonrec.kernels.sparse_optimizers.rules import RULES, scalars
from tritonrec.kernels.triton_jit import jit_kernel
from tritonrec.kernels.triton_padding import num_valid

ELEMENTS, BLOCK_D, NUM_WARPS = 1024, 128, 4
ROWS_OF_A_MEAN = 32


@triton.jit
def tile_of(indices_ptr, num_rows, count_ptr, dim, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Occurrences, table rows, columns (int64) and mask of this program's tile, false behind the count."""
    occurrence = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    inside = occurrence < num_valid(num_rows, count_ptr)
    # row 0 behind the count is a legal row, which the mask leaves alone
    row = tl.load(indices_ptr + occurrence, mask=inside, other=0)
    return occurrence, row, column, inside & (column < dim)


@jit_kernel
def elementwise_kernel(
    weight_ptr, weight_stride, first_ptr, first_stride, second_ptr, second_stride, indices_ptr, grad_ptr,
    grad_stride, num_rows, count_ptr, dim, rate, eps, beta1, rest1, beta2, rest2, l2, decay,
    RULE: tl.constexpr, L2: tl.constexpr, DECAYS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The rules whose states are as wide as the weight; their formulas are in `op.py`."""
    occurrence, row, column, mask = tile_of(indices_ptr, num_rows, count_ptr, dim, ROWS, BLOCK_D)
    gradient = tl.load(grad_ptr + occurrence * grad_stride + column, mask=mask, other=0.0)
    place = weight_ptr + row * weight_stride + column
    weight = tl.load(place, mask=mask, other=0.0)
    if L2:
        gradient = gradient + l2 * weight
    if DECAYS:
        weight = weight * decay
    if first_ptr is not None:
        first_place = first_ptr + row * first_stride + column
        first = tl.load(first_place, mask=mask, other=0.0)
        if RULE != "ftrl":
            first = beta1 * first
    if second_ptr is not None:
        second_place = second_ptr + row * second_stride + column
        second = tl.load(second_place, mask=mask, other=0.0)
    if RULE == "sgd":
        change = rate * gradient
    elif RULE == "momentum_sgd":
        first = first + gradient
        change = rate * first
    elif RULE == "nesterov_sgd":
        first = first + gradient
        change = rate * (gradient + beta1 * first)
    elif RULE == "adagrad":
        second = second + gradient * gradient
        # A masked element would divide 0 by 0 where eps is 0; its result is never stored.
        change = tl.div_rn(rate * gradient, tl.sqrt_rn(second) + eps)
    elif RULE == "ftrl":
        root = tl.sqrt_rn(second)
        second = second + gradient * gradient
        change = tl.div_rn(tl.sqrt_rn(second) - root, tl.zeros_like(root) + rate)
        first = (first + gradient) - change * weight
        clipped = tl.where(first > beta1, beta1, tl.where(first < -beta1, -beta1, first))
        divisor = tl.div_rn(eps + tl.sqrt_rn(second), tl.zeros_like(root) + rate) + l2
        weight = tl.div_rn(clipped - first, divisor)
        change = tl.zeros_like(weight)
    else:
        first = first + rest1 * gradient
        second = beta2 * second + rest2 * (gradient * gradient)
        change = tl.div_rn(rate * first, tl.sqrt_rn(second) + eps)
    if first_ptr is not None:
        tl.store(first_place, first, mask=mask)
    if second_ptr is not None:
        tl.store(second_place, second, mask=mask)
    tl.store(place, weight - change, mask=mask)


@triton.jit
def add_halves(lanes, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Lanes (ROWS, 2 * HALF) to (ROWS, HALF): lane j plus lane j + HALF, an order no backend may change."""
    low, high = tl.split(tl.permute(tl.reshape(lanes, (ROWS, 2, HALF)), (0, 2, 1)))
    return low + high


@triton.jit
def sum_of_lanes(lanes, ROWS: tl.constexpr):
    """Lanes (ROWS, 16) to (ROWS, 1) by a fixed tree: on another backend tl.sum may add in another order."""
    lanes = add_halves(lanes, ROWS, 8)
    lanes = add_halves(lanes, ROWS, 4)
    lanes = add_halves(lanes, ROWS, 2)
    return add_halves(lanes, ROWS, 1)


@jit_kernel
def rowwise_kernel(
    weight_ptr, weight_stride, first_ptr, first_stride, second_ptr, second_stride, indices_ptr, grad_ptr,
    grad_stride, num_rows, count_ptr, dim, rate, eps, beta1, rest1, beta2, rest2, l2, decay, L2: tl.constexpr,
    DECAYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row-wise Adam, and without a first moment row-wise Adagrad; the second one is of mean squares."""
    # the grid has no second axis, so the tile's columns are the 16 lanes
    occurrence, row, lane, _ = tile_of(indices_ptr, num_rows, count_ptr, dim, ROWS, 16)
    inside = occurrence < num_valid(num_rows, count_ptr)
    # 16 lanes for every dimension and device: another number would change the order of the sum
    lanes = tl.zeros((ROWS, 16), tl.float32)
    for start in range(tl.full((), 0, tl.int64), dim, 16):
        mask = inside & (start + lane < dim)
        gradient = tl.load(grad_ptr + occurrence * grad_stride + start + lane, mask=mask, other=0.0)
        if L2:
            place = weight_ptr + row * weight_stride + start + lane
            gradient = gradient + l2 * tl.load(place, mask=mask, other=0.0)
        lanes += gradient * gradient
    # div_rn and sqrt_rn round correctly; a plain division may be an approximation
    mean = tl.div_rn(sum_of_lanes(lanes, ROWS), tl.full((ROWS, 1), 0.0, tl.float32) + dim)
    second = tl.load(second_ptr + row * second_stride, mask=inside, other=0.0)
    second = second + mean if first_ptr is None else beta2 * second + rest2 * mean
    # several threads may load one state or weight, for the store and for more: none may load it changed
    tl.debug_barrier()
    tl.store(second_ptr + row * second_stride, second, mask=inside)
    divisor = tl.sqrt_rn(second) + eps
    if first_ptr is None:
        step = tl.div_rn(tl.full((ROWS, 1), 0.0, tl.float32) + rate, divisor)
    # the gradient is read again, since a row may be wider than the registers hold
    for start in range(tl.full((), 0, tl.int64), dim, 16):
        mask = inside & (start + lane < dim)
        gradient = tl.load(grad_ptr + occurrence * grad_stride + start + lane, mask=mask, other=0.0)
        place = weight_ptr + row * weight_stride + start + lane
        weight = tl.load(place, mask=mask, other=0.0)
        if L2:
            gradient = gradient + l2 * weight
        if DECAYS:
            weight = weight * decay
        if first_ptr is None:
            change = step * gradient
        else:
            first_place = first_ptr + row * first_stride + start + lane
            first = beta1 * tl.load(first_place, mask=mask, other=0.0) + rest1 * gradient
            tl.store(first_place, first, mask=mask)
            change = tl.div_rn(rate * first, tl.broadcast_to(divisor, (ROWS, 16)))
        tl.store(place, weight - change, mask=mask)


@jit_kernel
def norm_kernel(
    weight_ptr, weight_stride, first_ptr, first_stride, second_ptr, second_stride, indices_ptr, grad_ptr,
    grad_stride, num_rows, count_ptr, dim, rate, eps, beta1, rest1, beta2, rest2, l2, scale,
    RULE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """LAMB, row-wise LAMB and LARS: a row's norm and that of its change, or its gradient, set its rate."""
    occurrence, row, lane, _ = tile_of(indices_ptr, num_rows, count_ptr, dim, ROWS, 16)
    inside = occurrence < num_valid(num_rows, count_ptr)
    divisor = tl.zeros((ROWS, 1), tl.float32)
    if RULE == "rowwise_lamb":
        lanes = tl.zeros((ROWS, 16), tl.float32)
        for start in range(tl.full((), 0, tl.int64), dim, 16):
            mask = inside & (start + lane < dim)
            gradient = tl.load(grad_ptr + occurrence * grad_stride + start + lane, mask=mask, other=0.0)
            lanes += gradient * gradient
        mean = tl.div_rn(sum_of_lanes(lanes, ROWS), tl.full((ROWS, 1), 0.0, tl.float32) + dim)
        second = beta2 * tl.load(second_ptr + row * second_stride, mask=inside, other=0.0) + rest2 * mean
        # as in `rowwise_kernel`
        tl.debug_barrier()
        tl.store(second_ptr + row * second_stride, second, mask=inside)
        divisor = tl.sqrt_rn(second) + eps
    weights = tl.zeros((ROWS, 16), tl.float32)
    others = tl.zeros((ROWS, 16), tl.float32)
    for start in range(tl.full((), 0, tl.int64), dim, 16):
        mask = inside & (start + lane < dim)
        other = tl.load(grad_ptr + occurrence * grad_stride + start + lane, mask=mask, other=0.0)
        weight = tl.load(weight_ptr + row * weight_stride + start + lane, mask=mask, other=0.0)
        if RULE != "lars_sgd":
            first_place = first_ptr + row * first_stride + start + lane
            first = beta1 * tl.load(first_place, mask=mask, other=0.0) + rest1 * other
            tl.store(first_place, first, mask=mask)
            if RULE == "lamb":
                second_place = second_ptr + row * second_stride + start + lane
                second = beta2 * tl.load(second_place, mask=mask, other=0.0) + rest2 * (other * other)
                tl.store(second_place, second, mask=mask)
                other = tl.div_rn(scale * first, tl.sqrt_rn(second) + eps) + l2 * weight
            else:
                other = tl.div_rn(scale * first, tl.broadcast_to(divisor, (ROWS, 16))) + l2 * weight
            # a masked element may be 0 / 0
            other = tl.where(mask, other, 0.0)
        weights += weight * weight
        others += other * other
    of_weight, of_other = tl.sqrt_rn(sum_of_lanes(weights, ROWS)), tl.sqrt_rn(sum_of_lanes(others, ROWS))
    if RULE == "lars_sgd":
        trusted = tl.div_rn(scale * of_weight, of_other + l2 * of_weight)
    else:
        trusted = rate * tl.div_rn(of_weight, of_other)
    step = tl.where((of_weight == 0) | (of_other == 0), rate, trusted)
    # the moments just written are read again, maybe by other threads
    tl.debug_barrier()
    for start in range(tl.full((), 0, tl.int64), dim, 16):
        mask = inside & (start + lane < dim)
        place = weight_ptr + row * weight_stride + start + lane
        weight = tl.load(place, mask=mask, other=0.0)
        first_place = first_ptr + row * first_stride + start + lane
        first = tl.load(first_place, mask=mask, other=0.0)
        if RULE == "lars_sgd":
            gradient = tl.load(grad_ptr + occurrence * grad_stride + start + lane, mask=mask, other=0.0)
            first = beta1 * first + step * (gradient + l2 * weight)
            tl.store(first_place, first, mask=mask)
            change = first
        else:
            if RULE == "lamb":
                second = tl.load(second_ptr + row * second_stride + start + lane, mask=mask, other=0.0)
                below = tl.sqrt_rn(second) + eps
            else:
                below = tl.broadcast_to(divisor, (ROWS, 16))
            change = step * (tl.div_rn(scale * first, below) + l2 * weight)
        tl.store(place, weight - change, mask=mask)


@jit_kernel
def custom_kernel(
    rows_ptr, row_stride, indices_ptr, grad_ptr, grad_stride, num_rows, count_ptr, dim, step, lr,
    UPDATE: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A user's update (`RowOptimizer.custom`) of rows: weight | WIDE states like it | NARROW of a column."""
    occurrence, row, column, mask = tile_of(indices_ptr, num_rows, count_ptr, dim, ROWS, BLOCK_D)
    inside = occurrence < num_valid(num_rows, count_ptr)
    gradient = tl.load(grad_ptr + occurrence * grad_stride + column, mask=mask, other=0.0)
    place = rows_ptr + row * row_stride
    wide = tl.cast(dim, tl.int64)
    weight, states = tl.load(place + column, mask=mask, other=0.0), ()
    for i in tl.static_range(WIDE):
        states += (tl.load(place + (i + 1) * wide + column, mask=mask, other=0.0),)  # type: ignore[assignment]
    for i in tl.static_range(NARROW):
        states += (tl.load(place + (WIDE + 1) * wide + i, mask=inside, other=0.0),)  # type: ignore[assignment]
    weight, states = UPDATE(weight, states, gradient, step, lr)
    # several threads may load one value: none may load it changed
    tl.debug_barrier()
    tl.store(place + column, weight, mask=mask)
    for i in tl.static_range(WIDE):
        tl.store(place + (i + 1) * wide + column, states[i], mask=mask)
    for i in tl.static_range(NARROW):
        tl.store(place + (WIDE + 1) * wide + i, states[WIDE + i], mask=inside)


@jit_kernel
def lazy_decay_kernel(
    weight_ptr, weight_stride, last_update_ptr, last_update_stride, indices_ptr, factors_ptr, step, num_rows,
    count_ptr, dim, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Each weight times the factors of the updates since its row's last one, one after another."""
    # the grid has no second axis: all columns of a row wait for one `last_update`, which is then written
    occurrence, row, offset, _ = tile_of(indices_ptr, num_rows, count_ptr, BLOCK_D, ROWS, BLOCK_D)
    inside = occurrence < num_valid(num_rows, count_ptr)
    last = tl.load(last_update_ptr + row * last_update_stride, mask=inside, other=0.0)
    # no comparison with NaN holds, and the smaller float fits an integer
    done = tl.where((last >= 1) & (last < step), last, step * 1.0).to(tl.int32)
    done = tl.where(last >= 1, done, step - 1)
    first = tl.min(tl.min(tl.where(inside, done, step), 1), 0)
    for start in range(tl.full((), 0, tl.int64), dim, BLOCK_D):
        column = start + offset
        mask = inside & (column < dim)
        place = weight_ptr + row * weight_stride + column
        weight = tl.load(place, mask=mask, other=0.0)
        for update in range(first, step):
            weight = tl.where(update >= done, weight * tl.load(factors_ptr + update), weight)
        tl.store(place, weight, mask=mask)
    # several threads may load one number: none may load it changed
    tl.debug_barrier()
    tl.store(last_update_ptr + row * last_update_stride, tl.zeros((ROWS, 1), tl.float32) + step, mask=inside)


def _tile(dim: int) -> tuple[int, int]:
    """Rows and columns."""
    block = min(BLOCK_D, triton.next_power_of_2(dim))
    return ELEMENTS // block, block


def update(*arguments: Any, rule: str) -> None:
    """See `tritonrec.kernels.sparse_optimizers`."""
    weight, *states, indices, grad, lr, eps, beta1, beta2, weight_decay, step, count = arguments
    if grad.numel() == 0:
        return
    grad, (num_rows, dim) = contiguous_rows(grad), grad.shape
    declared = RULES[rule]
    if declared.states == ("state",):  # a second moment
        states.insert(0, None)
    first, second, *_ = (*states, None, None)
    numbers = scalars(rule, lr, eps, beta1, beta2, weight_decay, step)
    given = (
        weight,
        weight.stride(0),
        first,
        0 if first is None else first.stride(0),
        second,
        0 if second is None else second.stride(0),
        indices.contiguous(),
        grad,
        grad.stride(0),
        num_rows,
        count,
        dim,
        *map(float, numbers[:6]),
        float(numbers.l2),
    )
    constants: dict[str, object] = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    rows = ROWS_OF_A_MEAN
    grid: tuple[int, ...] = (triton.cdiv(num_rows, rows),)
    if rule in ("lamb", "rowwise_lamb", "lars_sgd"):
        norm_kernel[grid](*given, float(numbers.scale), RULE=rule, ROWS=rows, **constants)
        return
    given += (float(numbers.decay),)
    constants |= {"L2": bool(numbers.l2) and declared.decay == "l2", "DECAYS": bool(numbers.decay != 1)}
    if declared.row_wise:
        rowwise_kernel[grid](*given, ROWS=rows, **constants)
        return
    rows, block = _tile(dim)
    constants |= {"RULE": "adam" if rule == "adamw" else rule, "ROWS": rows, "BLOCK_D": block}
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(dim, block))
    elementwise_kernel[grid](*given, **constants)


def update_of_tiles(
    rows: torch.Tensor, indices: torch.Tensor, gradient: torch.Tensor, step: int, lr: float,
    count: torch.Tensor | None, function: Any, wide: int, narrow: int,
) -> None:  # fmt: skip
    """A user's update of a tile, over all rows of (R, (1 + wide) * dim + narrow)."""
    gradient, (num_rows, dim) = contiguous_rows(gradient), gradient.shape
    block = triton.next_power_of_2(dim)
    tile = max(1, ELEMENTS // block)
    custom_kernel[(triton.cdiv(num_rows, tile),)](
        rows, rows.stride(0), indices.contiguous(), gradient, gradient.stride(0), num_rows, count, dim, step,
        lr, UPDATE=function, WIDE=wide, NARROW=narrow, ROWS=tile, BLOCK_D=block, num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def lazy_decay(weight, last_update, indices, factors, step, count) -> None:
    """See `tritonrec.ops.sparse_lazy_decay`."""
    num_rows, dim = indices.shape[0], weight.shape[1]
    if num_rows * dim == 0:
        return
    rows, block = _tile(dim)
    lazy_decay_kernel[(triton.cdiv(num_rows, rows),)](
        weight, weight.stride(0), last_update, last_update.stride(0), indices.contiguous(),
        factors.contiguous(), step, num_rows, count, dim, ROWS=rows, BLOCK_D=block, num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
