"""A linear layer whose every row is a function of that row and the weights, bit for bit.

    y[t, o] = bias[o] + sum over i of x[t, i] * weight[o, i]
    dx[t, i] = sum over o of dy[t, o] * weight[o, i]
    dW_s = sum over the tokens t of sample s of dy[t]^T x[t]
    accumulator += round(dW_s * 2**fraction_bits)                       with offsets of samples
    accumulator += sum over t of round(dy[t]^T x[t] * 2**fraction_bits)  without: row by row

Dimensions: L tokens, B samples, `in` and `out` features. On the CPU an element is one float32 sum in
ascending order of its terms, in chains of 64, each term added by a fused multiply-add, so its bits do not
depend on the batch, the thread count or the vendor's BLAS. In Triton a tile has one fixed shape whatever the
number of rows.

`linear` alone gives the weights an ordinary float32 gradient, a sum over all rows of the batch.
`linear_weight_grad` is its exact twin: each sample's gradient is rounded once and added as int64. Without
offsets each row's is, which knows nothing of samples and so has one sum for any of them: the way of models
with one row a sample, and the faster one below 16 to 40 rows a sample (docs/ops.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise, product

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import LOW, LOWER, widen
from tritonrec.kernels.deferred import refuse
from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.fixed_point.errors import FRACTION_BITS, ExactSumError, check_fraction_bits
from tritonrec.kernels.fixed_point.op import round_to_fixed_point
from tritonrec.kernels.fused import fused_multiply_add
from tritonrec.kernels.gradients import Targets, Terms, targets_of
from tritonrec.kernels.offsets import check_offsets
from tritonrec.kernels.op import Op
from tritonrec.kernels.row_layout import check_matrix
from tritonrec.kernels.row_terms import RowTerms, add_rows


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_offsets: torch.Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """x @ weight.T + bias, row by row.

    Args:
        x: (L, in) float32, bf16 or fp16, rows contiguous (any row stride).
        weight: (out, in). bias: (out,) or None. Of x's dtype.
        seq_offsets: (B + 1,) int32 or int64, sample b owns rows seq_offsets[b] : seq_offsets[b + 1]. It
            changes no value; a `GradientAccumulator` adds the weight's gradient by these samples, without
            them row by row.
    Returns:
        (L, out) of x's dtype. Differentiable in x (row by row again), weight and bias.
    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    return LINEAR(x, weight, bias, seq_offsets, impl=impl)


def linear_weight_grad(
    accumulator: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    seq_offsets: torch.Tensor | None = None,
    fraction_bits: int = FRACTION_BITS,
    name: str = "weight",
    *,
    bias_accumulator: torch.Tensor | None = None,
    bias_name: str = "bias",
    impl: Impl = "auto",
) -> torch.Tensor:
    """Add each sample's weight gradient, or each row's, rounded once: one sum for every split of the batch.

    With `bias_accumulator` the bias's gradient as well, whose terms are the tokens' dy.

    Args:
        accumulator: (out, in) int64 multiples of ``2**-fraction_bits``, changed in place; contiguous rows.
        dy: (L, out) float32, bf16 or fp16. x: (L, in) of dy's dtype. Any strides. A sample's product is a
            float32 sum of exact products where they have 16 bits.
        seq_offsets: (B + 1,) int32 or int64, sample b owns rows seq_offsets[b] : seq_offsets[b + 1]. The
            float32 gradient of a sample is rounded half to even. None: the exact product of each row is
            rounded, half away from zero.
        bias_accumulator: (out,) int64, contiguous, changed in place. name, bias_name: in errors.
    Returns:
        `accumulator`.
    Raises:
        ExactSumError: a sample's or row's gradient is not finite or too large, or the sum leaves int64. The
            accumulators then hold parts of the sums and have to be discarded.
        ValueError: shapes, dtypes or offsets that do not fit; arguments that share memory with the
            accumulator.
    """
    bias = bias_accumulator, bias_name
    LINEAR_WEIGHT_GRAD(accumulator, dy, x, seq_offsets, fraction_bits, name, *bias, impl=impl)
    return accumulator


# Reference: the products written as loops over rows and samples.

Bad = tuple[int, int, int, float | None]


def linear_reference(x, weight, bias, _seq_offsets=None) -> torch.Tensor:
    """One row at a time, elementwise products and one sum along the row: no neighbour takes part."""
    rows = [(weight * row).sum(1) for row in x]
    out = torch.stack(rows) if rows else x.new_empty(0, weight.shape[0])
    return out if bias is None else out + bias


def linear_weight_grad_reference(
    accumulator, dy, x, seq_offsets, bits, name, bias_accumulator=None, bias_name=""
) -> None:
    """See `linear_weight_grad`."""
    for term, values in enumerate(_terms(dy, x, seq_offsets)):
        nearest = round_away if seq_offsets is None else round_to_fixed_point
        for row, column in product(*map(range, accumulator.shape)):
            value = float(values[row, column])
            units = nearest(value, bits)
            if units is None or not -(2**63) <= int(accumulator[row, column]) + units < 2**63:
                refuse(no_sum((term, row, column, value), bits, name))
                continue
            accumulator[row, column] += units
    if bias_accumulator is not None:
        add_rows(bias_accumulator, dy, bits, bias_name, "reference")


def _terms(dy: torch.Tensor, x: torch.Tensor, seq_offsets: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """(out, in) of each sample, summed in float32; without offsets the exact float64 product of each row."""
    if seq_offsets is None:
        yield from (torch.outer(one.double(), other.double()) for one, other in zip(dy, x, strict=True))
        return
    for start, stop in pairwise(seq_offsets.tolist()):
        total = torch.zeros(dy.shape[1], x.shape[1], dtype=torch.float32, device=dy.device)
        for t in range(start, stop):
            # One rounding a term, as the kernels' fused multiply-add has.
            total = fused_multiply_add(dy[t].unsqueeze(1), x[t], total)
        yield total


def round_away(value: float, bits: int) -> int | None:
    """The nearest integer to ``value * 2**bits``, of two the one away from zero; None as in fixed point."""
    if not abs(value) < 2.0 ** (62 - bits):
        return None
    units = math.floor(abs(Fraction(value)) * 2**bits + Fraction(1, 2))
    return units if value > 0 else -units


def no_sum(bad: Bad, bits: int, name: str) -> ExactSumError:
    """The error for (sample, row, column, value), the first value that cannot be added; None: it is gone."""
    sample, row, column, value = bad
    fits = value is not None and abs(value) < 2.0 ** (62 - bits)
    into = f"element [{row}, {column}] of the sum" if fits else ""
    return ExactSumError(f"gradient of {name} by sample", (sample, row, column), value, bits, into)


class ProductTerms(Terms):
    """The gradient of a weight (out, in): dy (L, out)^T times x (L, in), one product for each sample.

    Without offsets each row is a term, and the exact sum has the bits of any samples.
    """

    def __init__(self, dy: torch.Tensor, x: torch.Tensor, seq_offsets: torch.Tensor | None):
        self._dy, self._x, self._seq_offsets = dy, x, seq_offsets

    def total(self) -> torch.Tensor:
        """The product over all rows."""
        return widen(self._dy).t() @ widen(self._x)

    def add_to(self, sums: torch.Tensor, fraction_bits: int, name: str) -> None:
        """As `Terms.add_to`, sample by sample or row by row."""
        targets = Targets((sums,), fraction_bits, [name])
        add_gradients(targets, self._dy.detach(), self._x.detach(), self._seq_offsets)


def add_gradients(
    targets: Targets, dy: torch.Tensor, x: torch.Tensor, seq_offsets: torch.Tensor | None
) -> None:
    """Add the exact gradients of a weight, and of the bias where `targets` has one, for dy and x."""
    (weight, *bias), fraction_bits, (name, *names) = targets
    rest = (*bias, *names) if bias else (None, "")
    LINEAR_WEIGHT_GRAD.launch(weight, dy, x, seq_offsets, fraction_bits, name, *rest)


def _check(x, weight, bias) -> None:
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


def _save(ctx, inputs, output):
    x, weight, ctx.bias, seq_offsets, ctx.impl = inputs
    ctx.bias = ctx.bias is not None
    ctx.save_for_backward(x, weight, seq_offsets)


def _backward(ctx, dy):
    x, weight, seq_offsets = ctx.saved_tensors
    # The same op with the transposed weight, so dx is computed row by row as well.
    dx = LINEAR(dy, weight.t(), impl=ctx.impl) if ctx.needs_input_grad[0] else None
    places = (1, 2) if ctx.bias else (1,)
    # Both parameters have exact sums: their gradients are added here, and autograd gets none.
    targets = targets_of(ctx.accumulator, *(ctx.parameters.get(at) for at in places))
    if targets is not None and all(ctx.needs_input_grad[at] for at in places):
        add_gradients(targets, dy, x, seq_offsets)
        return dx, None, None, None
    return dx, ProductTerms(dy, x, seq_offsets), RowTerms(dy) if ctx.bias else None, None


def _check_weight_grad(accumulator, dy, x, fraction_bits, bias_accumulator) -> None:
    check_matrix("accumulator", accumulator, torch.int64, in_place=True)
    check_matrix("dy", dy, dy.dtype if dy.dtype in LOW else torch.float32)
    check_matrix("x", x, dy.dtype)
    if accumulator.shape != (dy.shape[1], x.shape[1]) or dy.shape[0] != x.shape[0]:
        raise ValueError(
            f"accumulator must be (out, in) for dy (L, out) and x (L, in), got "
            f"{tuple(accumulator.shape)}, dy {tuple(dy.shape)}, x {tuple(x.shape)}"
        )
    check_fraction_bits(fraction_bits)
    if bias_accumulator is not None:
        check_shape("bias_accumulator", bias_accumulator, (dy.shape[1],), torch.int64)
        if not bias_accumulator.is_contiguous():
            raise ValueError(
                f"bias_accumulator is written in place and must be contiguous, got strides "
                f"{bias_accumulator.stride()}"
            )


def _check_samples(x, seq_offsets) -> None:
    if seq_offsets is not None:
        check_offsets("seq_offsets", seq_offsets, x.shape[0])


LINEAR = Op(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_offsets) -> Tensor",
    reference=linear_reference, cpu="numba_linear:linear", triton="triton_linear:linear",
    check=_check, fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]),
    save=_save, backward=_backward, widens=True,
    autocast={"x": LOWER, "weight": LOWER, "bias": LOWER},
)  # fmt: skip
LINEAR_WEIGHT_GRAD = Op(
    "linear_weight_grad(Tensor(a!) accumulator, Tensor dy, Tensor x, Tensor? seq_offsets, int fraction_bits, "
    "str name, Tensor(b!)? bias_accumulator, str bias_name) -> ()",
    reference=linear_weight_grad_reference, cpu="numba_linear:linear_weight_grad",
    triton="triton_linear:linear_weight_grad",
    check=_check_weight_grad, check_memory=_check_samples, widens=True,
)  # fmt: skip
