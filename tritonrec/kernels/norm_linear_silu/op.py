"""The front of the HSTU layer, fused: layer norm, linear layer, SiLU.

    n = (x - mean(x)) / sqrt(var(x) + eps) * norm_weight + norm_bias,   z = n @ weight.T + bias
    y = z * s with s = 1 / (1 + exp(-z))
    dz = dy * s * (1 + z * (1 - s)),   dn = dz @ weight,   dx from dn by the norm's backward

Dimensions: L tokens, `in` and `out` features. Every row is a function of that row and the parameters, and its
bits are those of `norm_mul_dropout`, `linear` and `silu` one after another, in every implementation. What
lies between them never leaves the cache (or the tile), and backward needs x and two
numbers a row: n and z are computed again, or kept where asked for, with the same bits.

Backward takes dy in place: the buffer that held it holds dz, from which the caller makes the gradients of
weight and bias, over the batch or sample by sample (`linear_weight_grad`).

Source of the layer: Zhai et al., "Actions speak louder than words", ICML 2024, equation 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import FLOAT32, LOW, LOWER
from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.fixed_point.errors import check_fraction_bits
from tritonrec.kernels.linear.op import LINEAR, LINEAR_WEIGHT_GRAD, ProductTerms
from tritonrec.kernels.norm_mul_dropout.op import NORM_MUL_DROPOUT, NORM_MUL_DROPOUT_BACKWARD
from tritonrec.kernels.offsets import check_offsets
from tritonrec.kernels.op import Op
from tritonrec.kernels.row_layout import check_matrix
from tritonrec.kernels.row_terms import RowTerms, add_terms
from tritonrec.kernels.silu.op import SILU, SILU_BACKWARD

RECOMPUTED = ("norm", "linear")


def norm_linear_silu(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    recompute: Iterable[str] = ("norm",),
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """silu(layer_norm(x) @ weight.T + bias), row by row.

    Args:
        x: (L, in) float32, bf16 or fp16, rows contiguous (any row stride).
        norm_weight, norm_bias: (in,), of x's dtype. weight: (out, in). bias: (out,) or None. Both of x's
            dtype, or of lower precision, as autocast has them: norm in float32, product in theirs.
        eps: added to the variance.
        recompute: what backward computes again instead of keeping it: "norm", n (L, in); "linear", z
            (L, out). It changes no bit.
    Returns:
        (L, out) of the weight's dtype. Differentiable in x (row by row) and all parameters.
    Raises:
        ValueError: shapes, dtypes or names that do not fit.
    """
    again = {recompute} if isinstance(recompute, str) else set(recompute)
    if unknown := again.difference(RECOMPUTED):
        raise ValueError(f"recompute takes some of {RECOMPUTED}, got {sorted(unknown)}")
    keep = "norm" not in again, "linear" not in again
    return NORM_LINEAR_SILU(x, norm_weight, norm_bias, weight, bias, eps, *keep, impl=impl)[0]


# Reference: norm, linear layer and SiLU one after another, by the references of each.

NO_DROPOUT = 0.0, 0, None, None


def outputs(
    x: torch.Tensor, weight: torch.Tensor, keep_normed: bool, keep_linear: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, z, normed, means and rstds, of which z and normed have no rows where they are not kept."""
    tokens, (columns, inputs) = x.shape[0], weight.shape
    y, z, normed = (
        torch.empty(rows, size, dtype=weight.dtype, device=x.device)
        for rows, size in (
            (tokens, columns), (tokens * keep_linear, columns), (tokens * keep_normed, inputs)
        )
    )  # fmt: skip
    means, rstds = (torch.empty(tokens, dtype=torch.float32, device=x.device) for _ in range(2))
    return y, z, normed, means, rstds


def one_by_one(impl: Impl) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`norm_linear_silu` and its backward into dy, by the three ops one after another on `impl`."""

    def norm(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """n, rounded to the product's dtype, and means and rstds of the rows."""
        rows, means, rstds = NORM_MUL_DROPOUT.launch(x, None, weight, bias, eps, *NO_DROPOUT, impl=impl)
        return rows.to(dtype), means, rstds

    def norm_linear_silu(
        x: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor, weight: torch.Tensor,
        bias: torch.Tensor | None, eps: float, keep_normed: bool, keep_linear: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """y, and z and normed where they are kept, means and rstds, as `outputs` has them."""
        _, no_z, no_normed, *_ = outputs(x, weight, False, False)
        normed, *of_rows = norm(x, norm_weight, norm_bias, eps, weight.dtype)
        means, rstds = (each.float() for each in of_rows)
        z = LINEAR.launch(normed, weight, bias, impl=impl)
        kept = z if keep_linear else no_z, normed if keep_normed else no_normed
        return SILU.launch(z, impl=impl), *kept, means, rstds

    def norm_linear_silu_backward_into(
        dy: torch.Tensor, x: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor,
        weight: torch.Tensor, bias: torch.Tensor | None, eps: float, z: torch.Tensor, normed: torch.Tensor,
        means: torch.Tensor, rstds: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """dx, each token's terms of dnorm_weight and dnorm_bias, and n, without rows if it was given.

        dy (L, out), contiguous, becomes dz. z and normed: kept by forward, or without rows.
        """
        # What forward did not keep has no rows, and is made again here.
        has_normed = len(normed) == len(x)
        inner = normed if has_normed else norm(x, norm_weight, norm_bias, eps, weight.dtype)[0]
        z = z if len(z) == len(x) else LINEAR.launch(inner, weight, bias, impl=impl)
        dy.copy_(SILU_BACKWARD.launch(dy, z, impl=impl))
        dnormed = LINEAR.launch(dy, weight.t(), impl=impl).to(x.dtype)
        of_norm = x, None, norm_weight, norm_bias, *NO_DROPOUT, means, rstds
        dx, _, dweight, dbias = NORM_MUL_DROPOUT_BACKWARD.launch(dnormed, *of_norm, impl=impl)
        again = normed.new_empty(0, x.shape[1]) if has_normed else inner
        return dx, dweight.float(), dbias.float(), again

    return norm_linear_silu, norm_linear_silu_backward_into


norm_linear_silu_reference, norm_linear_silu_backward_into_reference = one_by_one("reference")


def norm_linear_silu_backward(
    backward_into: Callable[..., tuple[torch.Tensor, ...]], dy: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    """dz (L, out), and what the op into dy returns."""
    dz = dy.clone(memory_format=torch.contiguous_format)
    return dz, *backward_into(dz, *rest)


def by_terms(
    backward_into: Callable[..., tuple[torch.Tensor, ...]], impl: Impl
) -> Callable[..., torch.Tensor]:
    """`norm_linear_silu_backward_exact` by the op into dy, whose terms are rounded and added afterwards."""

    def norm_linear_silu_backward_exact(
        norm_weight_sums: torch.Tensor, norm_bias_sums: torch.Tensor, weight_sums: torch.Tensor,
        bias_sums: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, norm_weight: torch.Tensor,
        norm_bias: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, z: torch.Tensor,
        normed: torch.Tensor, means: torch.Tensor, rstds: torch.Tensor, seq_offsets: torch.Tensor,
        fraction_bits: int, names: list[str],
    ) -> torch.Tensor:  # fmt: skip
        """dx; dy becomes dz; exact gradients of norm_weight, norm_bias, weight and bias are added to sums.

        As `norm_linear_silu_backward_into`, and `linear_weight_grad` for dz and norm(x). names: of the four.
        """
        given = dy, x, norm_weight, norm_bias, weight, bias, eps, z, normed, means, rstds
        dx, *terms, again = backward_into(*given)
        add_terms((norm_weight_sums, norm_bias_sums), terms, fraction_bits, names[:2], impl)
        inner = again if len(again) else normed
        rest = seq_offsets, fraction_bits, names[2], bias_sums, names[3]
        LINEAR_WEIGHT_GRAD.launch(weight_sums, dy, inner, *rest, impl=impl)
        return dx

    return norm_linear_silu_backward_exact


norm_linear_silu_backward_exact_reference = by_terms(norm_linear_silu_backward_into_reference, "reference")


def _check(x, norm_weight, norm_bias, weight, bias) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x must be (L, in) and weight (out, in), got x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        )
    if 0 in weight.shape:
        raise ValueError(f"weight must have one feature or more each way, got {tuple(weight.shape)}")
    for name, vector, length in (
        ("norm_weight", norm_weight, x.shape[1]), ("norm_bias", norm_bias, x.shape[1]),
        ("bias", bias, weight.shape[0]),
    ):  # fmt: skip
        if vector is not None and vector.shape != (length,):
            raise ValueError(f"{name} must be ({length},), got {tuple(vector.shape)}")
    for name, tensor in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} must be {x.dtype} like x, got {tensor.dtype}")
    if weight.dtype != x.dtype and not (x.dtype == torch.float32 and weight.dtype in LOW):
        lower = " or of lower precision" if x.dtype == torch.float32 else ""
        raise ValueError(f"weight must be {x.dtype} like x{lower}, got {weight.dtype}")
    if bias is not None and bias.dtype != weight.dtype:
        raise ValueError(f"bias must be {weight.dtype} like weight, got {bias.dtype}")


def _check_backward(dy, x, weight, z, normed, means, rstds) -> None:
    check_matrix("dy", dy, weight.dtype)
    for name, tensor, columns in (("z", z, len(weight)), ("normed", normed, x.shape[1])):
        check_shape(name, tensor, (len(x) if len(tensor) else 0, columns), weight.dtype)
    for name, tensor in (("means", means), ("rstds", rstds)):
        check_shape(name, tensor, x.shape[:1], torch.float32)
    if dy.shape != (len(x), len(weight)):
        raise ValueError(f"dy must be ({len(x)}, {len(weight)}), got {tuple(dy.shape)}")


def _check_dy(dy, x, weight) -> None:
    if not dy.is_contiguous():
        raise ValueError(
            f"dy is written in place and must be ({len(x)}, {len(weight)}) and contiguous, got "
            f"{tuple(dy.shape)} with strides {dy.stride()}"
        )


def _check_sums(
    norm_weight_sums, norm_bias_sums, weight_sums, bias_sums, x, norm_weight, norm_bias, weight, bias,
    fraction_bits, names,
) -> None:  # fmt: skip
    check_shape("x", x, x.shape, x.dtype if x.dtype in LOW else torch.float32)
    for name, sums, like in (
        ("norm_weight_sums", norm_weight_sums, norm_weight), ("norm_bias_sums", norm_bias_sums, norm_bias),
        ("weight_sums", weight_sums, weight), ("bias_sums", bias_sums, bias),
    ):  # fmt: skip
        check_shape(name, sums, like.shape, torch.int64)
        if not sums.is_contiguous():
            raise ValueError(f"{name} is written in place and must be contiguous, got {sums.stride()}")
    check_fraction_bits(fraction_bits)
    if len(names) != 4:
        raise ValueError(f"names must be those of the four parameters, got {names}")


def _check_samples(x, seq_offsets) -> None:
    check_offsets("seq_offsets", seq_offsets, x.shape[0])


def _fake(x, weight, keep_normed, keep_linear):
    return outputs(x, weight, keep_normed, keep_linear)


def _fake_backward(dy, x, normed):
    return torch.empty_like(dy, memory_format=torch.contiguous_format), *_fake_backward_into(x, normed)


def _fake_backward_into(x, normed):
    terms = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for _ in range(2)]
    kept = normed.shape[0] == x.shape[0]
    return x.new_empty(x.shape), *terms, normed.new_empty(0 if kept else x.shape[0], x.shape[1])


def _save(ctx, inputs, output):
    x, norm_weight, norm_bias, weight, bias, ctx.eps, _, _, ctx.impl = inputs
    ctx.save_for_backward(x, norm_weight, norm_bias, weight, bias, *output[1:])


def _backward(ctx, dy, *_):
    x, norm_weight, norm_bias, weight, bias, z, normed, means, rstds = ctx.saved_tensors
    dz, dx, dnorm_weight, dnorm_bias, again = NORM_LINEAR_SILU_BACKWARD(
        dy, x, norm_weight, norm_bias, weight, bias, ctx.eps, z, normed, means, rstds, impl=ctx.impl
    )
    return (
        dx, RowTerms(dnorm_weight), RowTerms(dnorm_bias),
        # n is there once: kept by forward, or made again by backward; the other tensor has no rows.
        ProductTerms(dz, again if len(again) else normed, None),
        None if bias is None else RowTerms(dz), None, None, None,
    )  # fmt: skip


NORM_LINEAR_SILU = Op(
    "norm_linear_silu(Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor weight, Tensor? bias, "
    "float eps, bool keep_normed, bool keep_linear) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=norm_linear_silu_reference, cpu="numba_norm_linear_silu:norm_linear_silu",
    triton="triton_norm_linear_silu:norm_linear_silu", check=_check, fake=_fake, save=_save,
    backward=_backward,
    autocast=dict.fromkeys(("x", "norm_weight", "norm_bias"), FLOAT32)
    | dict.fromkeys(("weight", "bias"), LOWER),
)  # fmt: skip
NORM_LINEAR_SILU_BACKWARD_INTO = Op(
    "norm_linear_silu_backward_into(Tensor(a!) dy, Tensor x, Tensor norm_weight, Tensor norm_bias, "
    "Tensor weight, Tensor? bias, float eps, Tensor z, Tensor normed, Tensor means, Tensor rstds) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=norm_linear_silu_backward_into_reference,
    cpu="numba_norm_linear_silu:norm_linear_silu_backward_into",
    triton="triton_norm_linear_silu:norm_linear_silu_backward_into",
    check=(_check, _check_backward, _check_dy), fake=_fake_backward_into,
)  # fmt: skip
NORM_LINEAR_SILU_BACKWARD = Op(
    "norm_linear_silu_backward(Tensor dy, Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor weight, "
    "Tensor? bias, float eps, Tensor z, Tensor normed, Tensor means, Tensor rstds) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=norm_linear_silu_backward, over=NORM_LINEAR_SILU_BACKWARD_INTO,
    check=(_check, _check_backward), fake=_fake_backward,
)  # fmt: skip
NORM_LINEAR_SILU_BACKWARD_EXACT = Op(
    "norm_linear_silu_backward_exact(Tensor(a!) norm_weight_sums, Tensor(b!) norm_bias_sums, "
    "Tensor(c!) weight_sums, Tensor(d!) bias_sums, Tensor(e!) dy, Tensor x, Tensor norm_weight, "
    "Tensor norm_bias, Tensor weight, Tensor bias, float eps, Tensor z, Tensor normed, Tensor means, "
    "Tensor rstds, Tensor seq_offsets, int fraction_bits, str[] names) -> Tensor",
    reference=norm_linear_silu_backward_exact_reference,
    cpu="numba_norm_linear_silu:norm_linear_silu_backward_exact",
    triton="triton_norm_linear_silu:norm_linear_silu_backward_exact",
    check=(_check, _check_backward, _check_dy, _check_sums), check_memory=_check_samples,
    fake=lambda x: x.new_empty(x.shape),
)  # fmt: skip
