"""Registration of `norm_mul_dropout` and its derivative."""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import FLOAT32, LOW
from tritonrec.kernels.fixed_point.errors import check_fraction_bits
from tritonrec.kernels.gradients import targets_of
from tritonrec.kernels.norm_mul_dropout import reference
from tritonrec.kernels.op import Op
from tritonrec.kernels.row_layout import check_matrix
from tritonrec.kernels.row_terms import RowTerms


def _check(x, u, weight, bias, p, sample_ids, positions) -> None:
    if x.dim() != 2 or x.dtype not in (torch.float32, *LOW):
        raise ValueError(f"x must be (L, D) float32, bfloat16 or float16, got {tuple(x.shape)} {x.dtype}")
    if u is not None and (u.shape != x.shape or u.dtype != x.dtype):
        raise ValueError(f"u must be {tuple(x.shape)} {x.dtype} like x, got {tuple(u.shape)} {u.dtype}")
    if weight.shape != x.shape[1:] or bias.shape != x.shape[1:]:
        raise ValueError(
            f"weight and bias must be ({x.shape[1]},), got {tuple(weight.shape)} and {tuple(bias.shape)}"
        )
    if weight.dtype != bias.dtype or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"weight and bias must be {x.dtype} like x, or float32, got {weight.dtype} and {bias.dtype}"
        )
    if not 0 <= p < 1:
        raise ValueError(f"dropout must lie in [0, 1), got {p}")
    if p:
        for name, tensor in (("sample_ids", sample_ids), ("positions", positions)):
            if tensor is None or tensor.shape != x.shape[:1] or tensor.dtype != torch.int64:
                got = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
                raise ValueError(f"with dropout, {name} must be ({x.shape[0]},) int64, got {got}")


def _check_backward(dy, x, means, rstds) -> None:
    check_shape("dy", dy, x.shape, x.dtype)
    for name, tensor in (("means", means), ("rstds", rstds)):
        check_shape(name, tensor, x.shape[:1], torch.float32)


def _check_du(du, x) -> None:
    check_matrix("du", du, x.dtype, in_place=True)
    check_shape("du", du, x.shape, x.dtype)


def _check_sums(weight_sums, bias_sums, x, fraction_bits, names) -> None:
    for name, sums in (("weight_sums", weight_sums), ("bias_sums", bias_sums)):
        check_shape(name, sums, x.shape[1:], torch.int64)
        if not sums.is_contiguous():
            raise ValueError(f"{name} is written in place and must be contiguous, got {sums.stride()}")
    check_fraction_bits(fraction_bits)
    if len(names) != 2:
        raise ValueError(f"names must be those of weight and bias, got {names}")


def _check_gate(du, u, x) -> None:
    if (du is None) != (u is None):
        raise ValueError("du goes with u: give both or none")
    if du is not None:
        _check_du(du, x)


def _fake(x):
    means, rstds = (torch.empty(x.shape[0], dtype=torch.float32, device=x.device) for _ in range(2))
    return x.new_empty(x.shape), means, rstds


def _fake_backward(x, u):
    dx, dweight, dbias = _fake_backward_into(x)
    return dx, x.new_empty(x.shape) if u is not None else x.new_empty(0, x.shape[1]), dweight, dbias


def _fake_backward_into(x):
    terms = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for _ in range(2))
    return x.new_empty(x.shape), *terms


def _save(ctx, inputs, output):
    x, u, weight, bias, _, ctx.p, ctx.seed, sample_ids, positions, ctx.impl = inputs
    ctx.save_for_backward(x, u, weight, bias, sample_ids, positions, *output[1:])


def _backward(ctx, dy, _dmeans, _drstds):
    x, u, weight, bias, sample_ids, positions, means, rstds = ctx.saved_tensors
    targets = targets_of(ctx.accumulator, ctx.parameters.get(2), ctx.parameters.get(3))
    if targets is not None and all(ctx.needs_input_grad[2:4]):
        sums, *rest = targets
        du = None if u is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        given = dy, x, u, weight, bias, ctx.p, ctx.seed, sample_ids, positions, means, rstds
        dx = NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*sums, du, *given, *rest, impl=ctx.impl)
        return dx, du, *(None,) * 7
    dx, du, dweight, dbias = NORM_MUL_DROPOUT_BACKWARD(
        dy, x, u, weight, bias, ctx.p, ctx.seed, sample_ids, positions, means, rstds, impl=ctx.impl
    )
    return dx, None if u is None else du, RowTerms(dweight), RowTerms(dbias), *(None,) * 5


NORM_MUL_DROPOUT = Op(
    "norm_mul_dropout(Tensor x, Tensor? u, Tensor weight, Tensor bias, float eps, float p, int seed, "
    "Tensor? sample_ids, Tensor? positions) -> (Tensor, Tensor, Tensor)",
    reference=reference.norm_mul_dropout, cpu="numba_norm:norm_mul_dropout",
    triton="triton_norm:norm_mul_dropout", check=_check, fake=_fake, save=_save, backward=_backward,
    widens=True, autocast=dict.fromkeys(("x", "u", "weight", "bias"), FLOAT32),
)  # fmt: skip
NORM_MUL_DROPOUT_BACKWARD = Op(
    "norm_mul_dropout_backward(Tensor dy, Tensor x, Tensor? u, Tensor weight, Tensor bias, float p, "
    "int seed, Tensor? sample_ids, Tensor? positions, Tensor means, Tensor rstds) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference.norm_mul_dropout_backward, cpu="numba_norm:norm_mul_dropout_backward",
    triton="triton_norm:norm_mul_dropout_backward", check=(_check, _check_backward), fake=_fake_backward,
    widens=True,
)  # fmt: skip
NORM_MUL_DROPOUT_BACKWARD_INTO = Op(
    "norm_mul_dropout_backward_into(Tensor(a!) du, Tensor dy, Tensor x, Tensor u, Tensor weight, "
    "Tensor bias, float p, int seed, Tensor? sample_ids, Tensor? positions, Tensor means, Tensor rstds) "
    "-> (Tensor, Tensor, Tensor)",
    reference=reference.norm_mul_dropout_backward_into, cpu="numba_norm:norm_mul_dropout_backward_into",
    triton="triton_norm:norm_mul_dropout_backward_into",
    check=(_check, _check_backward, _check_du), fake=_fake_backward_into, widens=True,
)  # fmt: skip
NORM_MUL_DROPOUT_BACKWARD_EXACT = Op(
    "norm_mul_dropout_backward_exact(Tensor(a!) weight_sums, Tensor(b!) bias_sums, Tensor(c!)? du, "
    "Tensor dy, Tensor x, Tensor? u, Tensor weight, Tensor bias, float p, int seed, Tensor? sample_ids, "
    "Tensor? positions, Tensor means, Tensor rstds, int fraction_bits, str[] names) -> Tensor",
    reference=reference.norm_mul_dropout_backward_exact,
    cpu="numba_norm:norm_mul_dropout_backward_exact", triton="triton_norm:norm_mul_dropout_backward_exact",
    check=(_check, _check_backward, _check_gate, _check_sums), fake=lambda x: x.new_empty(x.shape),
    widens=True,
)  # fmt: skip
