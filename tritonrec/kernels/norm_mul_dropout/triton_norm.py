# mypy: ignore-errors
"""Norm, gate and dropout in Triton: one program holds one row at a time, padded to a power of two.

The block depends on D alone, so sums along a row have one order in any batch. The mask comes from the words
that the CPU draws, four neighbouring columns from one Philox block.

Exact gradients of weight and bias are added where their terms are computed: a program adds up those of its
rows, in int64, and then adds its sums atomically. Integers have one sum in any order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from tritonrec.kernels import dispatch
from tritonrec.kernels.fixed_point.errors import report_exact_gradients
from tritonrec.kernels.fixed_point.triton_fixed_point import (
    NONE,
    add_atomically,
    add_near,
    any_of,
    magnitude,
    near,
    round_to_fixed_point,
    without_zeros,
)
from tritonrec.kernels.norm_mul_dropout.op import by_terms
from tritonrec.kernels.philox.device_seed import Seed, in_kernel
from tritonrec.kernels.philox.reference import DROPOUT
from tritonrec.kernels.philox.triton_philox import high_word, low_word, philox4x32
from tritonrec.kernels.races import declared
from tritonrec.kernels.triton_float import divide
from tritonrec.kernels.triton_jit import jit_for_any_alignment

MOST_PROGRAMS = 65535  # a launch may have no more along an axis
ROWS_OF_PROGRAM = 8  # whose exact gradients are added up before an atomic addition


@triton.jit
def draw_kept(seed, tag, sample, position, threshold, factor, BLOCK_D: tl.constexpr):
    """(BLOCK_D,): `factor` where a column survives, else 0."""
    block = tl.arange(0, BLOCK_D // 4).to(tl.int64)
    zero = block * 0
    w0, w1, w2, w3 = philox4x32(
        low_word(sample + zero),
        high_word(sample + zero),
        low_word(tag + block),
        low_word(position + zero),
        low_word(seed + zero),
        high_word(seed + zero),
    )
    # join puts its arguments innermost: (w0, w2) with (w1, w3) flattens to w0, w1, w2, w3
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK_D,))
    # compared as int64, since thresholds reach 2**32 - 1
    return tl.where(words.to(tl.int64) >= threshold, factor, 0.0)


@jit_for_any_alignment
def forward_kernel(
    x_ptr, u_ptr, weight_ptr, bias_ptr, samples_ptr, positions_ptr, y_ptr, means_ptr, rstds_ptr,
    x_row, x_column, u_row, u_column, eps, seed, seed_ptr, tag, threshold, factor, rows, dim,
    GATED: tl.constexpr, DROPS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y = u * ((x - mean) * rstd * weight + bias) * kept, with rstd = 1 / sqrt(variance + eps)."""
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    column = tl.arange(0, BLOCK_D).to(tl.int64)
    inside = column < dim
    # loaded once, before the rows that a program walks
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    start = tl.program_id(0).to(tl.int64)  # an int64 bound makes the loop's variable int64
    # `divide` takes two float32
    count = tl.full((), 0.0, tl.float32) + dim
    for row in range(start, rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * x_row + column * x_column, mask=inside, other=0.0).to(tl.float32)
        mean = divide(tl.sum(x, axis=0), count)
        centred = tl.where(inside, x - mean, 0.0)
        # columns beyond the row are 0 in `centred`, so they add nothing to the variance
        variance = divide(tl.sum(centred * centred, axis=0), count)
        rstd = divide(tl.full((), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
        tl.store(means_ptr + row, mean)
        tl.store(rstds_ptr + row, rstd)
        if y_ptr is not None:  # `norm_linear_silu` wants means and rstds alone
            y = centred * rstd * weight + bias
            if GATED:
                u = tl.load(u_ptr + row * u_row + column * u_column, mask=inside, other=0.0)
                y = u.to(tl.float32) * y
            if DROPS:
                sample, position = tl.load(samples_ptr + row), tl.load(positions_ptr + row)
                y = y * draw_kept(seed, tag, sample, position, threshold, factor, BLOCK_D)
            tl.store(y_ptr + row * dim + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_term(total, bad, values, position, scale, limit):
    """(total, bad) with float32 values rounded and added; bad: the least position where that fails."""
    term, fits = round_to_fixed_point(values, scale, limit)
    after = total + term
    # a wrapped sum has the sign that neither of its operands has
    fits = fits & (((total ^ after) & (term ^ after)) >= 0)
    return after, tl.minimum(bad, tl.where(fits, NONE, position))


@triton.jit
def load_gradient(
    row, column, inside, dy_ptr, x_ptr, samples_ptr, positions_ptr, means_ptr, rstds_ptr, dy_row, dy_column,
    x_row, x_column, seed, tag, threshold, factor, DROPS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(g, normed, rstd) of a row: the gradient behind the gate, and the row without weight and bias."""
    g = tl.load(dy_ptr + row * dy_row + column * dy_column, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        sample, position = tl.load(samples_ptr + row), tl.load(positions_ptr + row)
        g = g * draw_kept(seed, tag, sample, position, threshold, factor, BLOCK_D)
    x = tl.load(x_ptr + row * x_row + column * x_column, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.load(rstds_ptr + row)
    return g, tl.where(inside, (x - tl.load(means_ptr + row)) * rstd, 0.0), rstd


# which program sees a sum leave int64 depends on who comes first; without such a sum nothing varies
@declared(varies=("bad_ptr",))
@jit_for_any_alignment
def backward_kernel(
    dy_ptr, x_ptr, u_ptr, weight_ptr, bias_ptr, samples_ptr, positions_ptr, means_ptr, rstds_ptr,
    dx_ptr, du_ptr, dweight_ptr, dbias_ptr, bad_ptr, dy_row, dy_column, x_row, x_column, u_row, u_column,
    du_row, du_column, seed, seed_ptr, tag, threshold, factor, rows, dim, scale, limit,
    near, GATED: tl.constexpr, DROPS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx, du, and per row the terms of dweight and dbias; `slope` is the gradient of the normed row.

    With `bad_ptr` dweight and dbias are exact sums (D,), to which the terms are added, times `scale`.
    """
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    column = tl.arange(0, BLOCK_D).to(tl.int64)
    inside = column < dim
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    start = tl.program_id(0).to(tl.int64)
    count = tl.full((), 0.0, tl.float32) + dim
    weight_sum = tl.zeros((BLOCK_D,), tl.int64)
    bias_sum = tl.zeros((BLOCK_D,), tl.int64)
    most = tl.zeros((BLOCK_D,), tl.int32)
    for row in range(start, rows, tl.num_programs(0)):
        to = row * dim + column
        g, normed, rstd = load_gradient(
            row, column, inside, dy_ptr, x_ptr, samples_ptr, positions_ptr, means_ptr, rstds_ptr, dy_row,
            dy_column, x_row, x_column, seed, tag, threshold, factor, DROPS, BLOCK_D,
        )  # fmt: skip
        if GATED:
            du = g * (normed * weight + bias)
            to_du = du_ptr + row * du_row + column * du_column
            tl.store(to_du, du.to(du_ptr.dtype.element_ty), mask=inside)
            g = g * tl.load(u_ptr + row * u_row + column * u_column, mask=inside, other=0.0).to(tl.float32)
        if bad_ptr is not None:
            most = tl.maximum(most, tl.maximum(magnitude(g * normed), magnitude(g)))
            weight_sum = add_near(weight_sum, g * normed, limit)
            bias_sum = add_near(bias_sum, g, limit)
        else:
            # terms, not sums: a float sum over a program's rows would depend on the grid
            tl.store(dbias_ptr + to, g, mask=inside)
            tl.store(dweight_ptr + to, g * normed, mask=inside)
        slope = g * weight
        # the norm takes out of x its mean and its scale, so dx has no part along either
        level = divide(tl.sum(slope, axis=0), count)
        along = divide(tl.sum(slope * normed, axis=0), count)
        dx = rstd * ((slope - level) - normed * along)
        tl.store(dx_ptr + to, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if bad_ptr is not None:
        worst = tl.full((), NONE, tl.int64)
        added = (rows - 1 - start) // tl.num_programs(0) + 1
        weight_sum = without_zeros(weight_sum, added, limit)
        bias_sum = without_zeros(bias_sum, added, limit)
        behind = tl.cast(rows, tl.int64) * dim  # positions of the bias are behind those of the weight
        if any_of(most >= magnitude(near)):
            # beyond the bound of sums without checks: once more, with them
            weight_sum = tl.zeros((BLOCK_D,), tl.int64)
            bias_sum = tl.zeros((BLOCK_D,), tl.int64)
            bad = tl.full((BLOCK_D,), NONE, tl.int64)
            for row in range(start, rows, tl.num_programs(0)):
                to = row * dim + column
                g, normed, rstd = load_gradient(
                    row, column, inside, dy_ptr, x_ptr, samples_ptr, positions_ptr, means_ptr, rstds_ptr,
                    dy_row, dy_column, x_row, x_column, seed, tag, threshold, factor, DROPS, BLOCK_D,
                )  # fmt: skip
                if GATED:
                    u = tl.load(u_ptr + row * u_row + column * u_column, mask=inside, other=0.0)
                    g = g * u.to(tl.float32)
                weight_sum, bad = add_term(weight_sum, bad, g * normed, to, scale, limit)
                bias_sum, bad = add_term(bias_sum, bad, g, behind + to, scale, limit)
            worst = tl.min(bad, axis=0)
        # a sum that leaves int64 here is named by the first row: any program may be the one to see it
        worst = tl.minimum(worst, add_atomically(dweight_ptr + column, weight_sum, column, inside))
        worst = tl.minimum(worst, add_atomically(dbias_ptr + column, bias_sum, behind + column, inside))
        tl.store(bad_ptr + start, worst)


def _constants(x: torch.Tensor, u: torch.Tensor | None, p: float) -> dict[str, int | bool]:
    """Constants of a launch; a Philox block needs four columns, and a thread two or more."""
    block = max(4, triton.next_power_of_2(x.shape[1]))
    return {
        "GATED": u is not None, "DROPS": p > 0, "BLOCK_D": block,
        "num_warps": min(max(block // 256, 1), 4), "enable_fp_fusion": False,
    }  # fmt: skip


def _draws(
    x: torch.Tensor, sample_ids: torch.Tensor | None, positions: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """A pointer that nobody follows needs a tensor all the same."""
    return (x if tensor is None else tensor.contiguous() for tensor in (sample_ids, positions))


def normalise(
    x: torch.Tensor, u: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float, p: float,
    seed: Seed, sample_ids: torch.Tensor | None, positions: torch.Tensor | None,
    y: torch.Tensor | None, means: torch.Tensor, rstds: torch.Tensor,
) -> None:  # fmt: skip
    """Fill y, unless it is None, means and rstds (contiguous); x and u with any strides."""
    rows, dim = x.shape
    gate = x if u is None else u
    forward_kernel[(min(rows, MOST_PROGRAMS),)](
        x, gate, weight.contiguous(), bias.contiguous(), *_draws(x, sample_ids, positions), y, means, rstds,
        *x.stride(), *gate.stride(), eps, *in_kernel(seed, p), DROPOUT, int(p * 2**32), 1 / (1 - p), rows,
        dim,
        **_constants(x, u, p),
    )  # fmt: skip


def norm_mul_dropout(x, u, weight, bias, *rest) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y (L, D), and means and rstds (L,) of the rows of x."""
    y = x.new_empty(x.shape)
    means, rstds = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    if y.numel() == 0:
        return y, means.zero_(), rstds.zero_()
    normalise(x, u, weight, bias, *rest, y, means, rstds)
    return y, means, rstds


def norm_mul_dropout_backward_into(
    du, dy, x, u, weight, bias, p, seed, sample_ids, positions, means, rstds
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx and the terms of dweight and dbias (contiguous); overwrites du; dy, x, u and du with any strides."""
    dx = x.new_empty(x.shape)
    dweight, dbias = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for _ in range(2))
    if dx.numel():
        draws = p, seed, sample_ids, positions
        _differentiate(du, dy, x, u, weight, bias, *draws, means, rstds, dx, dweight, dbias)
    return dx, dweight, dbias


def norm_mul_dropout_backward_exact(
    weight_sums, bias_sums, du, dy, x, u, weight, bias, p, seed, sample_ids, positions, means, rstds,
    fraction_bits, names,
) -> torch.Tensor:  # fmt: skip
    """See `tritonrec.kernels.norm_mul_dropout.op.norm_mul_dropout_backward_exact_reference`."""
    given = du, dy, x, u, weight, bias, p, seed, sample_ids, positions, means, rstds
    if not dispatch.has_int64_atomics(x):
        by_sum = by_terms(norm_mul_dropout_backward_into, "triton")
        return by_sum(weight_sums, bias_sums, *given, fraction_bits, names)
    dx = x.new_empty(x.shape)
    if dx.numel():
        bad = torch.empty(_exact_programs(len(x)), dtype=torch.int64, device=x.device)
        _differentiate(*given, dx, weight_sums, bias_sums, bad, fraction_bits)
        report_exact_gradients(bad, names, x.shape, fraction_bits)
    return dx


def _exact_programs(rows: int) -> int:
    """Few, since each adds its sums atomically; enough for the 132 processors of a H100 eight times."""
    return min(triton.cdiv(rows, ROWS_OF_PROGRAM), 1024)


def _differentiate(
    du: torch.Tensor | None, dy: torch.Tensor, x: torch.Tensor, u: torch.Tensor | None, weight: torch.Tensor,
    bias: torch.Tensor, p: float, seed: Seed, sample_ids: torch.Tensor | None, positions: torch.Tensor | None,
    means: torch.Tensor, rstds: torch.Tensor, dx: torch.Tensor, dweight: torch.Tensor, dbias: torch.Tensor,
    bad: torch.Tensor | None = None, fraction_bits: int = 0,
) -> None:  # fmt: skip
    """Fill dx, du and the terms, or add the terms to dweight and dbias where there is `bad`."""
    rows, dim = x.shape
    gate, of_gate = x if u is None else u, x if du is None else du
    programs = min(rows, MOST_PROGRAMS) if bad is None else len(bad)
    rows_of_program = triton.cdiv(rows, programs)
    backward_kernel[(programs,)](
        dy, x, gate, weight.contiguous(), bias.contiguous(), *_draws(x, sample_ids, positions),
        means.contiguous(), rstds.contiguous(), dx, of_gate, dweight, dbias, bad,
        *dy.stride(), *x.stride(), *gate.stride(), *of_gate.stride(),
        *in_kernel(seed, p), DROPOUT, int(p * 2**32), 1 / (1 - p), rows, dim,
        2.0**fraction_bits, 2.0 ** (62 - fraction_bits), near(fraction_bits, rows_of_program),
        **_constants(x, u, p),
    )  # fmt: skip
