"""Registration of `norm_linear_silu` and its derivative."""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import FLOAT32, LOW, LOWER
from tritonrec.kernels.fixed_point.errors import check_fraction_bits
from tritonrec.kernels.linear.register import ProductTerms
from tritonrec.kernels.norm_linear_silu import reference
from tritonrec.kernels.offsets import check_offsets
from tritonrec.kernels.op import Op
from tritonrec.kernels.row_layout import check_matrix
from tritonrec.kernels.row_terms import RowTerms


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
    return reference.outputs(x, weight, keep_normed, keep_linear)


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
        ProductTerms(dz, again if len(again) else normed, None),
        None if bias is None else RowTerms(dz), None, None, None,
    )  # fmt: skip


NORM_LINEAR_SILU = Op(
    "norm_linear_silu(Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor weight, Tensor? bias, "
    "float eps, bool keep_normed, bool keep_linear) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=reference.norm_linear_silu, cpu="numba_norm_linear_silu:norm_linear_silu",
    triton="triton_norm_linear_silu:norm_linear_silu", check=_check, fake=_fake, save=_save,
    backward=_backward,
    autocast=dict.fromkeys(("x", "norm_weight", "norm_bias"), FLOAT32)
    | dict.fromkeys(("weight", "bias"), LOWER),
)  # fmt: skip
NORM_LINEAR_SILU_BACKWARD = Op(
    "norm_linear_silu_backward(Tensor dy, Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor weight, "
    "Tensor? bias, float eps, Tensor z, Tensor normed, Tensor means, Tensor rstds) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=reference.norm_linear_silu_backward, cpu="numba_norm_linear_silu:norm_linear_silu_backward",
    triton="triton_norm_linear_silu:norm_linear_silu_backward", check=(_check, _check_backward),
    fake=_fake_backward,
)  # fmt: skip
NORM_LINEAR_SILU_BACKWARD_INTO = Op(
    "norm_linear_silu_backward_into(Tensor(a!) dy, Tensor x, Tensor norm_weight, Tensor norm_bias, "
    "Tensor weight, Tensor? bias, float eps, Tensor z, Tensor normed, Tensor means, Tensor rstds) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference.norm_linear_silu_backward_into,
    cpu="numba_norm_linear_silu:norm_linear_silu_backward_into",
    triton="triton_norm_linear_silu:norm_linear_silu_backward_into",
    check=(_check, _check_backward, _check_dy), fake=_fake_backward_into,
)  # fmt: skip
NORM_LINEAR_SILU_BACKWARD_EXACT = Op(
    "norm_linear_silu_backward_exact(Tensor(a!) norm_weight_sums, Tensor(b!) norm_bias_sums, "
    "Tensor(c!) weight_sums, Tensor(d!) bias_sums, Tensor(e!) dy, Tensor x, Tensor norm_weight, "
    "Tensor norm_bias, Tensor weight, Tensor bias, float eps, Tensor z, Tensor normed, Tensor means, "
    "Tensor rstds, Tensor seq_offsets, int fraction_bits, str[] names) -> Tensor",
    reference=reference.norm_linear_silu_backward_exact,
    cpu="numba_norm_linear_silu:norm_linear_silu_backward_exact",
    triton="triton_norm_linear_silu:norm_linear_silu_backward_exact",
    check=(_check, _check_backward, _check_dy, _check_sums), check_memory=_check_samples,
    fake=lambda x: x.new_empty(x.shape),
)  # fmt: skip
