"""Norm, linear layer and SiLU one after another, by the references of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.linear.register import LINEAR, LINEAR_WEIGHT_GRAD
from tritonrec.kernels.norm_mul_dropout.register import NORM_MUL_DROPOUT, NORM_MUL_DROPOUT_BACKWARD
from tritonrec.kernels.row_terms import add_terms
from tritonrec.kernels.silu.register import SILU, SILU_BACKWARD

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


norm_linear_silu, norm_linear_silu_backward_into = one_by_one("reference")


def norm_linear_silu_backward(dy: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    """dz (L, out), and what the op into dy returns."""
    dz = dy.clone(memory_format=torch.contiguous_format)
    return dz, *norm_linear_silu_backward_into(dz, *rest)


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


norm_linear_silu_backward_exact = by_terms(norm_linear_silu_backward_into, "reference")
