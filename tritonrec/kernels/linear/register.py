"""Registration of `linear` and `linear_weight_grad`."""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import LOW, LOWER, widen
from tritonrec.kernels.fixed_point.errors import check_fraction_bits
from tritonrec.kernels.gradients import Targets, Terms, targets_of
from tritonrec.kernels.linear import reference
from tritonrec.kernels.offsets import check_offsets
from tritonrec.kernels.op import Op
from tritonrec.kernels.row_layout import check_matrix
from tritonrec.kernels.row_terms import RowTerms


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
    dx = LINEAR(dy, weight.t(), impl=ctx.impl) if ctx.needs_input_grad[0] else None
    places = (1, 2) if ctx.bias else (1,)
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
    reference=reference.linear, cpu="numba_linear:linear", triton="triton_linear:linear",
    check=_check, fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]),
    save=_save, backward=_backward, widens=True,
    autocast={"x": LOWER, "weight": LOWER, "bias": LOWER},
)  # fmt: skip
LINEAR_WEIGHT_GRAD = Op(
    "linear_weight_grad(Tensor(a!) accumulator, Tensor dy, Tensor x, Tensor? seq_offsets, int fraction_bits, "
    "str name, Tensor(b!)? bias_accumulator, str bias_name) -> ()",
    reference=reference.linear_weight_grad, cpu="numba_linear:linear_weight_grad",
    triton="triton_linear:linear_weight_grad",
    check=_check_weight_grad, check_memory=_check_samples, widens=True,
)  # fmt: skip
