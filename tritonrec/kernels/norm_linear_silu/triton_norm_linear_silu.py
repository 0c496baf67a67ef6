# mypy: ignore-errors
"""Norm, linear layer and SiLU in Triton: rows are normalised while a product's tile is loaded.

A row's mean and deviation come from the norm's own kernel, in a pass that writes nothing else. The product
has the tiles of `linear`, fixed by dtype alone, and every step between is the one that the single ops take,
so the bits are those of the three ops one after another.

    L tokens, I inputs, O outputs
"""

from __future__ import annotations

import torch
import triton.language as tl

from tritonrec.kernels.linear.triton_linear import (
    INTERPRETED,
    configuration,
    grid_of,
    linear,
    linear_weight_grad,
    multiply_add,
)
from tritonrec.kernels.norm_linear_silu.op import NO_DROPOUT, outputs
from tritonrec.kernels.norm_mul_dropout.triton_norm import (
    norm_mul_dropout_backward_exact,
    norm_mul_dropout_backward_into,
    normalise,
)
from tritonrec.kernels.silu.triton_silu import backward_in_place as silu_backward_in_place
from tritonrec.kernels.triton_float import exp
from tritonrec.kernels.triton_jit import jit_kernel


@jit_kernel
def forward_kernel(
    x_ptr, norm_weight_ptr, norm_bias_ptr, means_ptr, rstds_ptr, weight_ptr, bias_ptr, y_ptr, z_ptr,
    x_row, x_column, weight_row, weight_column, tokens, inner, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """y, z or both (one that is None is not written): z = norm(x) @ weight + bias, y = silu(z)."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1).to(tl.int64)  # an int64 bound makes the loop's variable int64
    # not tl.cdiv, which adds before it divides: that sum may pass 2**31
    for tile in range(first, (tokens - 1) // ROWS + 1, tl.num_programs(1)):
        row = tile * ROWS + tl.arange(0, ROWS)
        # each tile of columns normalises its rows again, which saves (L, I) of memory
        mean = tl.load(means_ptr + row, mask=row < tokens, other=0.0)[:, None]
        rstd = tl.load(rstds_ptr + row, mask=row < tokens, other=0.0)[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(tl.full((), 0, tl.int64), inner, TERMS):
            term = start + tl.arange(0, TERMS)
            exists = (row < tokens)[:, None] & (term < inner)[None, :]
            x = tl.load(x_ptr + row[:, None] * x_row + term[None, :] * x_column, mask=exists, other=0.0)
            scale = tl.load(norm_weight_ptr + term, mask=term < inner, other=0.0).to(tl.float32)[None, :]
            shift = tl.load(norm_bias_ptr + term, mask=term < inner, other=0.0).to(tl.float32)[None, :]
            # 0 where there is no element, since shift alone would add bias times weight to the sum
            normed = tl.where(exists, (x.to(tl.float32) - mean) * rstd * scale + shift, 0.0)
            weight = tl.load(
                weight_ptr + term[:, None] * weight_row + column[None, :] * weight_column,
                mask=(term < inner)[:, None] & (column < columns)[None, :],
                other=0.0,
            )
            # rounded to the product's dtype, as the norm's output is between the single ops
            total = multiply_add(normed.to(weight.dtype), weight, total, PRECISION, INTERPRETED)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        to = row[:, None] * columns + column[None, :]
        exists = (row < tokens)[:, None] & (column < columns)[None, :]
        if z_ptr is not None:
            tl.store(z_ptr + to, total.to(z_ptr.dtype.element_ty), mask=exists)
        if y_ptr is not None:
            total = total.to(y_ptr.dtype.element_ty).to(tl.float32)
            y = tl.div_rn(total, 1.0 + exp(-total))
            tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=exists)


def norm_linear_silu(
    x, norm_weight, norm_bias, weight, bias, eps, keep_normed, keep_linear
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, and z and normed where they are kept, means and rstds, as `outputs` has them."""
    y, z, normed, means, rstds = outputs(x, weight, keep_normed, keep_linear)
    if len(x):
        _norm(x, norm_weight, norm_bias, eps, normed if keep_normed else None, means, rstds)
        _product(x, norm_weight, norm_bias, weight, bias, means, rstds, y, z if keep_linear else None)
    return y, z, normed, means, rstds


def norm_linear_silu_backward_exact(
    norm_weight_sums, norm_bias_sums, weight_sums, bias_sums, dy, x, norm_weight, norm_bias, weight, bias,
    eps, z, normed, means, rstds, seq_offsets, fraction_bits, names,
) -> torch.Tensor:  # fmt: skip
    """See `tritonrec.kernels.norm_linear_silu.op.norm_linear_silu_backward_exact_reference`."""
    means, rstds = means.contiguous(), rstds.contiguous()
    norm = norm_weight.contiguous(), norm_bias.contiguous()
    dnormed = _differentiate_silu(dy, x, *norm, weight, bias, z, means, rstds)
    dx = norm_mul_dropout_backward_exact(
        norm_weight_sums, norm_bias_sums, None, dnormed, x, None, *norm, *NO_DROPOUT, means, rstds,
        fraction_bits, names[:2],
    )  # fmt: skip
    # a norm that was not kept is computed while its rows are loaded: no pass over memory for it
    kept = len(normed) == len(x)
    linear_weight_grad(
        weight_sums, dy, normed if kept else x, seq_offsets, fraction_bits, names[2], bias_sums, names[3],
        (None,) * 4 if kept else (means, rstds, *norm),
    )  # fmt: skip
    return dx


def norm_linear_silu_backward_into(
    dy, x, norm_weight, norm_bias, weight, bias, eps, z, normed, means, rstds
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.norm_linear_silu.op.norm_linear_silu_backward_into_reference`."""
    means, rstds = means.contiguous(), rstds.contiguous()
    again = dy.new_empty(0 if len(normed) == len(x) else len(x), x.shape[1])
    if len(again):
        _norm(x, norm_weight, norm_bias, eps, again, torch.empty_like(means), torch.empty_like(rstds))
    dnormed = _differentiate_silu(dy, x, norm_weight, norm_bias, weight, bias, z, means, rstds)
    no_gate = x.new_empty(0, x.shape[1])
    dx, dnorm_weight, dnorm_bias = norm_mul_dropout_backward_into(
        no_gate, dnormed, x, None, norm_weight, norm_bias, *NO_DROPOUT, means, rstds
    )
    return dx, dnorm_weight, dnorm_bias, again


def _differentiate_silu(
    dy: torch.Tensor, x: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor,
    weight: torch.Tensor, bias: torch.Tensor | None, z: torch.Tensor, means: torch.Tensor,
    rstds: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The gradient of the norm's output; dy becomes dz, which saves a second (L, O)."""
    if len(z) != len(x):
        z = dy.new_empty(dy.shape)
        _product(x, norm_weight, norm_bias, weight, bias, means, rstds, None, z)
    silu_backward_in_place(dy, z.contiguous())
    return linear(dy, weight.t(), None)


def _norm(
    x: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor, eps: float,
    normed: torch.Tensor | None, means: torch.Tensor, rstds: torch.Tensor,
) -> None:  # fmt: skip
    """Fill means, rstds, and normed unless it is None."""
    normalise(x, None, norm_weight, norm_bias, eps, *NO_DROPOUT, normed, means, rstds)


def _product(
    x: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None, means: torch.Tensor, rstds: torch.Tensor,
    y: torch.Tensor | None, z: torch.Tensor | None,
) -> None:  # fmt: skip
    """Fill y and z unless None: x (L, I) and weight (O, I) with any strides, the others contiguous."""
    (tokens, inner), columns = x.shape, weight.shape[0]
    config = configuration(weight, inner, columns)
    forward_kernel[grid_of(config, tokens, columns)](
        x, norm_weight.contiguous(), norm_bias.contiguous(), means, rstds, weight,
        None if bias is None else bias.contiguous(), y, z, *x.stride(), weight.stride(1), weight.stride(0),
        tokens, inner, columns, **config, INTERPRETED=INTERPRETED, enable_fp_fusion=False,
    )  # fmt: skip
