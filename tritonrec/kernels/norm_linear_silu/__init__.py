"""The front of the HSTU layer, fused: layer norm, linear layer, SiLU.

    n = (x - mean(x)) / sqrt(var(x) + eps) * norm_weight + norm_bias,   z = n @ weight.T + bias
    y = z * s with s = 1 / (1 + exp(-z))
    dz = dy * s * (1 + z * (1 - s)),   dn = dz @ weight,   dx from dn by the norm's backward

Dimensions: L tokens, `in` and `out` features. Every row is a function of that row and the parameters, and in
float32 its bits are those of `norm_mul_dropout`, `linear` and `silu` one after another, in every
implementation. What lies between them never leaves the cache (or the tile), and backward needs x and two
numbers a row: n and z are computed again, or kept where asked for, with the same bits.

Backward takes dy in place: the buffer that held it holds dz, from which the caller makes the gradients of
weight and bias, over the batch or sample by sample (`linear_weight_grad`).

Source of the layer: Zhai et al., "Actions speak louder than words", ICML 2024, equation 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from tritonrec.kernels.arguments import check_shape, check_tensors
from tritonrec.kernels.dispatch import Impl, implementation
from tritonrec.kernels.linear import rows_times
from tritonrec.kernels.norm_linear_silu import reference
from tritonrec.kernels.norm_mul_dropout import norm_backward
from tritonrec.kernels.overlap import check_no_overlap
from tritonrec.kernels.registration import custom_op
from tritonrec.kernels.row_layout import check_matrix, contiguous_rows, flat_rows
from tritonrec.kernels.workers import over_ranges

__all__ = ["norm_linear_silu"]

RECOMPUTED = ("norm", "linear")


def norm_linear_silu(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    recompute: Iterable[str] = ("norm",),
    impl: Impl = "auto",
) -> torch.Tensor:
    """silu(layer_norm(x) @ weight.T + bias), row by row.

    Args:
        x: (L, in) float32, rows contiguous (any row stride); bf16 and fp16 too in Triton.
        norm_weight, norm_bias: (in,). weight: (out, in). bias: (out,) or None. Of x's dtype.
        eps: added to the variance.
        recompute: what backward computes again instead of keeping it: "norm", n (L, in); "linear", z
            (L, out). It changes no bit.
    Returns:
        (L, out) of x's dtype. Differentiable in x (row by row) and all parameters.
    Raises:
        ValueError: shapes, dtypes or names that do not fit.
    """
    _check(x, norm_weight, norm_bias, weight, bias)
    again = {recompute} if isinstance(recompute, str) else set(recompute)
    if unknown := again.difference(RECOMPUTED):
        raise ValueError(f"recompute takes some of {RECOMPUTED}, got {sorted(unknown)}")
    return _norm_linear_silu(
        x, norm_weight, norm_bias, weight, bias, eps, "norm" not in again, "linear" not in again, impl
    )[0]


def _check(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    parameters = {"norm_weight": norm_weight, "norm_bias": norm_bias, "weight": weight, "bias": bias}
    check_tensors(("bias",), x=x, **parameters)
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
    for name, tensor in parameters.items():
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(f"{name} must be {x.dtype} like x, got {tensor.dtype}")


def _chosen(impl: str, x: torch.Tensor) -> str:
    chosen = implementation(impl, x)  # type: ignore[arg-type]
    if chosen == "cpu" and x.dtype != torch.float32:
        raise ValueError(f"norm_linear_silu on the CPU computes in float32, got {x.dtype}")
    return chosen


def _outputs(
    x: torch.Tensor, weight: torch.Tensor, keep_normed: bool, keep_linear: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, z, normed, means and rstds, of which z and normed have no rows where they are not kept."""
    tokens, columns = len(x), len(weight)
    z, normed = x.new_empty(tokens * keep_linear, columns), x.new_empty(tokens * keep_normed, x.shape[1])
    means, rstds = (torch.empty(tokens, dtype=torch.float32, device=x.device) for _ in range(2))
    return x.new_empty(tokens, columns), z, normed, means, rstds


_NO_BIAS = np.empty(0, np.float32)


def _vector(vector: torch.Tensor | None) -> np.ndarray:
    return _NO_BIAS if vector is None else vector.contiguous().numpy()


def _forward(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    keep_normed: bool,
    keep_linear: bool,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = _chosen(impl, x)
    y, z, normed, means, rstds = _outputs(x, weight, keep_normed, keep_linear)
    if len(x) == 0:
        return y, z, normed, means, rstds
    if chosen == "reference":
        all_normed = torch.empty_like(x)
        y, all_z = reference.forward(x, norm_weight, norm_bias, weight, bias, eps, all_normed, means, rstds)
        return y, all_z if keep_linear else z, all_normed if keep_normed else normed, means, rstds
    if chosen == "triton":
        from tritonrec.kernels.norm_linear_silu import triton_norm_linear_silu as triton_impl

        triton_impl.norm(x, norm_weight, norm_bias, eps, normed if keep_normed else None, means, rstds)
        triton_impl.product(
            x, norm_weight, norm_bias, weight, bias, means, rstds, y, z if keep_linear else None
        )
        return y, z, normed, means, rstds
    from tritonrec.kernels.norm_linear_silu import numba_norm_linear_silu

    (rows, dim), columns = x.shape, weight.shape[0]
    arguments = (
        *flat_rows(contiguous_rows(x)), _vector(norm_weight), _vector(norm_bias), np.float32(eps),
        weight.t().contiguous().view(-1).numpy(), _vector(bias), y.view(-1).numpy(), z.view(-1).numpy(),
        normed.view(-1).numpy(), means.numpy(), rstds.numpy(),
    )  # fmt: skip

    def run(start: int, stop: int) -> None:
        numba_norm_linear_silu.forward(
            *arguments, np.uintp(start), np.uintp(stop), np.uintp(dim), np.uintp(columns)
        )

    over_ranges(run, rows, rows * (2.0 * dim * columns + 20.0 * dim + 10.0 * columns))
    return y, z, normed, means, rstds


def _backward_in_place(
    dy: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    z: torch.Tensor,
    normed: torch.Tensor,
    means: torch.Tensor,
    rstds: torch.Tensor,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = _chosen(impl, x)
    has_z, has_normed = len(z) == len(x), len(normed) == len(x)
    terms = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for _ in range(3))
    dx, dnorm_weight, dnorm_bias = terms
    again = x.new_empty(len(x) * (not has_normed), x.shape[1])
    if len(x) == 0:
        return dx.to(x.dtype), dnorm_weight, dnorm_bias, again
    if chosen == "reference":
        if not (has_z and has_normed):
            fresh = torch.empty_like(x)
            _, all_z = reference.forward(
                x, norm_weight, norm_bias, weight, bias, eps, fresh, means.clone(), rstds.clone()
            )
            z, again = z if has_z else all_z, again if has_normed else fresh
        reference.backward(
            dy, x, norm_weight, norm_bias, weight, z, means, rstds, dx, dnorm_weight, dnorm_bias
        )
    elif chosen == "triton":
        from tritonrec.kernels.norm_linear_silu import triton_norm_linear_silu as triton_impl
        from tritonrec.kernels.silu import triton_silu

        if not has_normed:
            triton_impl.norm(x, norm_weight, norm_bias, eps, again, means.clone(), rstds.clone())
        if not has_z:
            z = x.new_empty(dy.shape)
            triton_impl.product(x, norm_weight, norm_bias, weight, bias, means, rstds, None, z)
        triton_silu.backward(dy, z, dy)
        dnormed = rows_times(dy, weight, None, impl).float()  # .float() is there for bf16 and fp16
        dx, _, dnorm_weight, dnorm_bias = norm_backward(
            dnormed, x.float(), None, norm_weight.float(), norm_bias.float(), 0.0, 0, None, None, means,
            rstds, impl,
        )  # fmt: skip
    else:
        from tritonrec.kernels.norm_linear_silu import numba_norm_linear_silu

        (rows, dim), columns = x.shape, weight.shape[0]
        inner_weight = _NO_BIAS if has_z else weight.t().contiguous().view(-1).numpy()
        arguments = (
            dy.view(-1).numpy(), *flat_rows(contiguous_rows(x)), _vector(norm_weight), _vector(norm_bias),
            np.float32(eps), inner_weight, _vector(bias), weight.contiguous().view(-1).numpy(),
            z.contiguous().view(-1).numpy(), (normed if has_normed else again).contiguous().view(-1).numpy(),
            means.numpy(), rstds.numpy(), dx.view(-1).numpy(), dnorm_weight.view(-1).numpy(),
            dnorm_bias.view(-1).numpy(),
        )  # fmt: skip

        def run(start: int, stop: int) -> None:
            numba_norm_linear_silu.backward(
                *arguments, np.uintp(start), np.uintp(stop), np.uintp(dim), np.uintp(columns), has_normed
            )

        products = 1 if has_z else 2
        over_ranges(run, rows, rows * (2.0 * products * dim * columns + 60.0 * dim + 20.0 * columns))
    return dx.to(x.dtype), dnorm_weight, dnorm_bias, again


@custom_op("tritonrec::norm_linear_silu", mutates_args=())
def _norm_linear_silu(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    keep_normed: bool,
    keep_linear: bool,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(x, norm_weight, norm_bias, weight, bias)
    x, norm_weight, norm_bias, weight = (t.detach() for t in (x, norm_weight, norm_bias, weight))
    bias = None if bias is None else bias.detach()
    return _forward(x, norm_weight, norm_bias, weight, bias, eps, keep_normed, keep_linear, impl)


@_norm_linear_silu.register_fake
def _(x, norm_weight, norm_bias, weight, bias, eps, keep_normed, keep_linear, impl):
    return _outputs(x, weight, keep_normed, keep_linear)


@custom_op("tritonrec::norm_linear_silu_backward", mutates_args=())
def _norm_linear_silu_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    z: torch.Tensor,
    normed: torch.Tensor,
    means: torch.Tensor,
    rstds: torch.Tensor,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dz (L, out), and what the op into dy returns."""
    dz = dy.clone(memory_format=torch.contiguous_format)
    rest = _norm_linear_silu_backward_into(
        dz, x, norm_weight, norm_bias, weight, bias, eps, z, normed, means, rstds, impl
    )
    return dz, *rest


@_norm_linear_silu_backward.register_fake
def _(dy, *rest):
    return torch.empty_like(dy, memory_format=torch.contiguous_format), *_backward_into_fake(dy, *rest)


@custom_op("tritonrec::norm_linear_silu_backward_into", mutates_args=("dy",))
def _norm_linear_silu_backward_into(
    dy: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    z: torch.Tensor,
    normed: torch.Tensor,
    means: torch.Tensor,
    rstds: torch.Tensor,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, each token's terms of dnorm_weight and dnorm_bias, and n, without rows if it was given.

    dy (L, out), contiguous, becomes dz. z and normed: kept by forward, or without rows.
    """
    _check(x, norm_weight, norm_bias, weight, bias)
    kept = {"z": (z, len(weight)), "normed": (normed, x.shape[1])}
    rows = {"means": means, "rstds": rstds}
    check_tensors(x=x, dy=dy, z=z, normed=normed, **rows)
    check_matrix("dy", dy, x.dtype)
    for name, (tensor, columns) in kept.items():
        check_shape(name, tensor, (len(x) if len(tensor) else 0, columns), x.dtype)
    for name, tensor in rows.items():
        check_shape(name, tensor, x.shape[:1], torch.float32)
    if dy.shape != (len(x), len(weight)) or not dy.is_contiguous():
        raise ValueError(
            f"dy is written in place and must be ({len(x)}, {len(weight)}) and contiguous, got "
            f"{tuple(dy.shape)} with strides {dy.stride()}"
        )
    read = {
        "x": x, "norm_weight": norm_weight, "norm_bias": norm_bias, "weight": weight, "bias": bias,
        "z": z, "normed": normed, "means": means, "rstds": rstds,
    }  # fmt: skip
    check_no_overlap({"dy": dy}, read)
    norm_weight, norm_bias, weight = norm_weight.detach(), norm_bias.detach(), weight.detach()
    bias = None if bias is None else bias.detach()
    z, normed = z.detach(), normed.detach()
    means, rstds = means.detach().contiguous(), rstds.detach().contiguous()
    return _backward_in_place(
        dy, x.detach(), norm_weight, norm_bias, weight, bias, eps, z, normed, means, rstds, impl
    )


@_norm_linear_silu_backward_into.register_fake
def _backward_into_fake(dy, x, norm_weight, norm_bias, weight, bias, eps, z, normed, means, rstds, impl):
    terms = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for _ in range(2)]
    kept = normed.shape[0] == x.shape[0]
    return x.new_empty(x.shape), *terms, x.new_empty(0 if kept else x.shape[0], x.shape[1])


def _save(ctx, inputs, output):
    x, norm_weight, norm_bias, weight, bias, ctx.eps, _, _, ctx.impl = inputs
    ctx.save_for_backward(x, norm_weight, norm_bias, weight, bias, *output[1:])


def _backward(ctx, dy, *_):
    x, norm_weight, norm_bias, weight, bias, z, normed, means, rstds = ctx.saved_tensors
    dz, dx, dnorm_weight, dnorm_bias, again = _norm_linear_silu_backward(
        dy, x, norm_weight, norm_bias, weight, bias, ctx.eps, z, normed, means, rstds, ctx.impl
    )
    normed = again if len(again) else normed
    return (
        dx, dnorm_weight.sum(0).to(x.dtype), dnorm_bias.sum(0).to(x.dtype), dz.t() @ normed,
        None if bias is None else dz.sum(0), None, None, None, None,
    )  # fmt: skip


_norm_linear_silu.register_autograd(_backward, setup_context=_save)
