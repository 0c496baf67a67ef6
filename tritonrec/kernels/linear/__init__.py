"""A linear layer whose every row is a function of that row and the weights, bit for bit.

    y[t, o] = bias[o] + sum over i of x[t, i] * weight[o, i]
    dx[t, i] = sum over o of dy[t, o] * weight[o, i]
    dW_s = sum over the tokens t of sample s of dy[t]^T x[t],   grid += round(dW_s * 2**bits)

Dimensions: L tokens, B samples, `in` and `out` features. On the CPU an element is one float32 sum in
ascending order of its terms, without fused multiply-add, so its bits do not depend on the batch, the thread
count or the vendor's BLAS. In Triton a tile has one fixed shape whatever the number of rows.

`linear` alone gives the weights an ordinary float32 gradient, a sum over all rows of the batch.
`linear_weight_grad` is its exact twin: each sample's gradient is rounded once and added as int64.
"""

from __future__ import annotations

import numpy as np
import torch

from tritonrec.kernels.arguments import check_tensors
from tritonrec.kernels.dispatch import Impl, implementation
from tritonrec.kernels.fixed_point.errors import FRACTION_BITS, ExactSumError
from tritonrec.kernels.fixed_point.errors import check_fraction_bits as check_bits
from tritonrec.kernels.linear import reference
from tritonrec.kernels.offsets import check_offsets
from tritonrec.kernels.overlap import check_no_overlap
from tritonrec.kernels.registration import custom_op
from tritonrec.kernels.row_layout import check_matrix, contiguous_rows, flat_rows
from tritonrec.kernels.workers import over_ranges

__all__ = ["accumulate_weight_grad", "linear", "linear_weight_grad", "rows_times"]


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, impl: Impl = "auto"
) -> torch.Tensor:
    """x @ weight.T + bias, row by row.

    Args:
        x: (L, in) float32, rows contiguous (any row stride); bf16 and fp16 too in Triton.
        weight: (out, in). bias: (out,) or None. Of x's dtype.
    Returns:
        (L, out) of x's dtype. Differentiable in x (row by row again), weight and bias.
    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(x, weight, bias)
    return _linear(x, weight, bias, impl)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    check_tensors(("bias",), x=x, weight=weight, bias=bias)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x must be (L, in) and weight (out, in), got x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"bias must be ({weight.shape[0]},), got {tuple(bias.shape)}")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(
            f"x, weight and bias must share a dtype, got {x.dtype}, {weight.dtype} and "
            f"{None if bias is None else bias.dtype}"
        )


def rows_times(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, impl: str) -> torch.Tensor:
    """``x @ weight + bias`` with weight (in, out): `linear` and its input gradient, without the checks."""
    chosen = implementation(impl, x)  # type: ignore[arg-type]
    if chosen == "reference":
        return reference.linear(x, weight.t(), bias)
    (tokens, inner), columns = x.shape, weight.shape[1]
    out = x.new_empty(tokens, columns)
    if out.numel() == 0:
        return out
    if chosen == "triton":
        from tritonrec.kernels.linear import triton_linear

        triton_linear.rows_times(x, weight, bias, out)
        return out
    from tritonrec.kernels.linear import numba_linear

    if x.dtype != torch.float32:
        raise ValueError(f"linear on the CPU computes in float32, got {x.dtype}")
    if inner > 1 and x.stride(1) != 1:
        x = x.contiguous()
    flat, stride = flat_rows(x)
    table = weight.detach().contiguous().view(-1).numpy()
    shift = _NO_BIAS if bias is None else bias.detach().contiguous().numpy()
    result = out.view(-1).numpy()

    def run(start: int, stop: int) -> None:
        numba_linear.rows_times(
            flat, stride, table, shift, result,
            np.uintp(start), np.uintp(stop), np.uintp(inner), np.uintp(columns),
        )  # fmt: skip

    over_ranges(run, tokens, 2.0 * tokens * inner * columns, step=4)
    return out


_NO_BIAS = np.empty(0, np.float32)


@custom_op("tritonrec::linear", mutates_args=())
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, impl: str) -> torch.Tensor:
    _check(x, weight, bias)
    return rows_times(x.detach(), weight.detach().t(), None if bias is None else bias.detach(), impl)


@_linear.register_fake
def _(x, weight, bias, impl):
    return x.new_empty(x.shape[0], weight.shape[0])


def _save(ctx, inputs, output):
    x, weight, bias, ctx.impl = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _backward(ctx, dy):
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
    dx = _linear(dy, weight.t(), None, ctx.impl) if needs_x else None
    return dx, dy.t() @ x if needs_weight else None, dy.sum(0) if ctx.has_bias and needs_bias else None, None


_linear.register_autograd(_backward, setup_context=_save)


def linear_weight_grad(
    grid: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    seq_offsets: torch.Tensor,
    bits: int = FRACTION_BITS,
    name: str = "weight",
    impl: Impl = "auto",
) -> torch.Tensor:
    """Add each sample's weight gradient to `grid`, rounded once: the same for every split of the batch.

    Args:
        grid: (out, in) int64, changed in place; contiguous rows.
        dy: (L, out) float32. x: (L, in) float32. Any strides.
        seq_offsets: (B + 1,) int32 or int64, sample b owns rows seq_offsets[b] : seq_offsets[b + 1].
        bits: the grid is 2**-bits. name: what an error calls the weight.
    Returns:
        `grid`.
    Raises:
        ExactSumError: a sample's gradient is not finite or too large, or the sum leaves int64. The grid then
            holds a part of the sum and has to be discarded.
        ValueError: shapes, dtypes or offsets that do not fit; `grid` shares memory with another argument.
    """
    _check_weight_grad(grid, dy, x, seq_offsets, bits)
    _linear_weight_grad(grid, dy, x, seq_offsets, bits, name, impl)
    return grid


def _check_weight_grad(
    grid: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, seq_offsets: torch.Tensor, bits: int
) -> None:
    check_tensors(grid=grid, dy=dy, x=x, seq_offsets=seq_offsets)
    check_matrix("grid", grid, torch.int64, in_place=True)
    check_matrix("dy", dy, torch.float32)
    check_matrix("x", x, torch.float32)
    if grid.shape != (dy.shape[1], x.shape[1]) or dy.shape[0] != x.shape[0]:
        raise ValueError(
            f"grid must be (out, in) for dy (L, out) and x (L, in), got grid {tuple(grid.shape)}, "
            f"dy {tuple(dy.shape)}, x {tuple(x.shape)}"
        )
    check_bits(bits)


def accumulate_weight_grad(
    grid: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    seq_offsets: torch.Tensor,
    bits: int,
    name: str,
    impl: str,
) -> None:
    """`linear_weight_grad` without the checks and the dispatcher: the door for hot callers."""
    chosen = implementation(impl, grid)  # type: ignore[arg-type]
    if grid.numel() == 0 or x.shape[0] == 0:
        return
    if chosen == "reference":
        bad = reference.add_weight_gradients(grid, dy, x, seq_offsets, bits)
    elif chosen == "cpu":
        bad = _accumulate_cpu(grid, dy, x, seq_offsets, bits)
    else:
        from tritonrec.kernels.linear import triton_linear

        bad = triton_linear.add_weight_gradients(grid, dy, x, seq_offsets, bits)
    if bad is not None:
        sample, row, column, value = bad
        fits = abs(value) < 2.0 ** (62 - bits)
        into = f"element [{row}, {column}] of the sum" if fits else ""
        raise ExactSumError(f"gradient of {name} by sample", (sample, row, column), value, bits, into)


def _accumulate_cpu(
    grid: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, seq_offsets: torch.Tensor, bits: int
) -> tuple[int, int, int, float] | None:
    from tritonrec.kernels.linear import numba_linear

    dy, x = contiguous_rows(dy), contiguous_rows(x)
    arguments = (*flat_rows(grid), *flat_rows(dy), *flat_rows(x), seq_offsets.contiguous().numpy())
    inner, scale, limit = np.uintp(x.shape[1]), 2.0**bits, np.float32(2.0 ** (62 - bits))

    def run(start: int, stop: int) -> tuple[int, int, int, float]:
        return numba_linear.add_weight_gradients(
            *arguments, np.uintp(start), np.uintp(stop), inner, scale, limit
        )

    found = over_ranges(run, grid.shape[0], 2.0 * x.shape[0] * grid.numel(), step=4)
    bad = [(int(sample), int(row), int(column), float(value)) for sample, row, column, value in found]
    return min((place for place in bad if place[0] >= 0), key=lambda place: place[:3], default=None)


@custom_op("tritonrec::linear_weight_grad", mutates_args=("grid",))
def _linear_weight_grad(
    grid: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    seq_offsets: torch.Tensor,
    bits: int,
    name: str,
    impl: str,
) -> None:
    _check_weight_grad(grid, dy, x, seq_offsets, bits)
    check_no_overlap({"grid": grid}, {"dy": dy, "x": x, "seq_offsets": seq_offsets})
    check_offsets("seq_offsets", seq_offsets, x.shape[0])
    accumulate_weight_grad(grid, dy.detach(), x.detach(), seq_offsets, bits, name, impl)


@_linear_weight_grad.register_fake
def _(grid, dy, x, seq_offsets, bits, name, impl):
    return None
