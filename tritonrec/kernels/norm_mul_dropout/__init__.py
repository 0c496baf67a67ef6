"""The gate of the HSTU layer, fused: layer norm, product with u, dropout.

    n = (x - mean(x)) / sqrt(var(x) + eps),   y = u * (n * weight + bias) * kept / (1 - p)

Dimensions: L tokens, D columns. Sums run along a row only, so a row's bits do not depend on the batch.
Whether a column is kept is a function of (seed, sample, position, column), drawn from Philox with the tag
`DROPOUT`; all implementations keep the same columns, and nothing but the seed is stored for backward::

    counter   sample id (two words), DROPOUT | column // 4, position        key   seed
    column d survives if word d % 4 >= floor(p * 2**32)

Source of the layer: Zhai et al., "Actions speak louder than words", ICML 2024, equation 3.
"""

from __future__ import annotations

import numpy as np
import torch

from tritonrec.kernels.arguments import check_shape, check_tensors
from tritonrec.kernels.dispatch import Impl, implementation
from tritonrec.kernels.norm_mul_dropout import reference
from tritonrec.kernels.overlap import check_no_overlap
from tritonrec.kernels.philox import DROPOUT
from tritonrec.kernels.philox.reference import halves
from tritonrec.kernels.registration import custom_op
from tritonrec.kernels.row_layout import check_matrix, flat_rows
from tritonrec.kernels.workers import over_ranges

__all__ = ["norm_backward", "norm_forward", "norm_mul_dropout"]

Terms = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def norm_mul_dropout(
    x: torch.Tensor,
    u: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-6,
    dropout: float = 0.0,
    seed: int = 0,
    sample_ids: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    training: bool = True,
    impl: Impl = "auto",
) -> torch.Tensor:
    """u * layer_norm(x), with dropout keyed by what it is for.

    Args:
        x: (L, D) float32. u: (L, D) or None, which stands for ones (a plain layer norm). Rows contiguous.
        weight, bias: (D,). eps: added to the variance.
        dropout: probability p that an element is zeroed, 0 <= p < 1; only while `training`.
        seed: int64. sample_ids, positions: (L,) int64 per token, of which positions count by their low
            32 bits; needed where there is dropout.
    Returns:
        (L, D) float32. Differentiable in x, u, weight and bias.
    Raises:
        ValueError: shapes, dtypes or p that do not fit.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
    p = dropout if training else 0.0
    _check(x, u, weight, bias, p, sample_ids, positions)
    if not p:
        sample_ids = positions = None
    return _norm_mul_dropout(x, u, weight, bias, eps, p, seed, sample_ids, positions, impl)[0]


def _check(
    x: torch.Tensor,
    u: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    p: float,
    sample_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> None:
    check_tensors(
        ("u", "sample_ids", "positions"),
        x=x, u=u, weight=weight, bias=bias, sample_ids=sample_ids, positions=positions,
    )  # fmt: skip
    if x.dim() != 2 or x.dtype != torch.float32:
        raise ValueError(f"x must be (L, D) float32, got {tuple(x.shape)} {x.dtype}")
    if u is not None and (u.shape != x.shape or u.dtype != x.dtype):
        raise ValueError(f"u must be {tuple(x.shape)} {x.dtype} like x, got {tuple(u.shape)} {u.dtype}")
    if weight.shape != x.shape[1:] or bias.shape != x.shape[1:]:
        raise ValueError(
            f"weight and bias must be ({x.shape[1]},), got {tuple(weight.shape)} and {tuple(bias.shape)}"
        )
    if not weight.dtype == bias.dtype == x.dtype:
        raise ValueError(f"weight and bias must be {x.dtype} like x, got {weight.dtype} and {bias.dtype}")
    if not 0 <= p < 1:
        raise ValueError(f"dropout must lie in [0, 1), got {p}")
    if p:
        for name, tensor in (("sample_ids", sample_ids), ("positions", positions)):
            if tensor is None or tensor.shape != x.shape[:1] or tensor.dtype != torch.int64:
                got = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
                raise ValueError(f"with dropout, {name} must be ({x.shape[0]},) int64, got {got}")


def _check_backward(dy: torch.Tensor, x: torch.Tensor, means: torch.Tensor, rstds: torch.Tensor) -> None:
    check_tensors(x=x, dy=dy, means=means, rstds=rstds)
    check_shape("dy", dy, x.shape, x.dtype)
    for name, tensor in (("means", means), ("rstds", rstds)):
        check_shape(name, tensor, x.shape[:1], torch.float32)


def norm_forward(
    x: torch.Tensor,
    u: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    p: float,
    seed: int,
    sample_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y (L, D), means (L,), rstds (L,): without the checks and the dispatcher, for hot callers."""
    chosen = implementation(impl, x)  # type: ignore[arg-type]
    y, means, rstds = x.new_empty(x.shape), x.new_empty(len(x)), x.new_empty(len(x))
    if y.numel() == 0:
        return y, means.zero_(), rstds.zero_()
    if chosen == "reference":
        kept = _reference_mask(p, seed, sample_ids, positions, x.shape[1])
        reference.forward(x, u, weight, bias, eps, kept, y, means, rstds)
    elif chosen == "triton":
        from tritonrec.kernels.norm_mul_dropout import triton_norm

        triton_norm.forward(x, u, weight, bias, eps, p, seed, DROPOUT, sample_ids, positions, y, means, rstds)
    else:
        from tritonrec.kernels.norm_mul_dropout import numba_norm

        rows, dim = x.shape
        arguments = (
            *_flat(x), *_flat(u), *_vectors(weight, bias), np.float32(eps),
            *_draws(p, seed, sample_ids, positions), y.view(-1).numpy(), means.numpy(), rstds.numpy(),
        )  # fmt: skip

        def run(start: int, stop: int) -> None:
            numba_norm.forward(*arguments, np.uintp(start), np.uintp(stop), np.uintp(dim))

        over_ranges(run, rows, (60.0 if p else 20.0) * y.numel())
    return y, means, rstds


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    u: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    p: float,
    seed: int,
    sample_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
    means: torch.Tensor,
    rstds: torch.Tensor,
    impl: str,
    du: torch.Tensor | None = None,
) -> Terms:
    """dx, du, and each token's terms of dweight and dbias, all (L, D); du is (0, D) where u is None.

    du overwrites the tensor given for it (rows contiguous, any row stride); new without.
    """
    chosen = implementation(impl, x)  # type: ignore[arg-type]
    dx, dweight, dbias = (x.new_empty(x.shape) for _ in range(3))
    if du is None:
        du = x.new_empty(x.shape) if u is not None else x.new_empty(0, x.shape[1])
    if dx.numel() == 0:
        return dx, du, dweight, dbias
    if chosen == "reference":
        kept = _reference_mask(p, seed, sample_ids, positions, x.shape[1])
        reference.backward(dy, x, u, weight, bias, kept, means, rstds, dx, du, dweight, dbias)
    elif chosen == "triton":
        from tritonrec.kernels.norm_mul_dropout import triton_norm

        triton_norm.backward(
            dy, x, u, weight, bias, p, seed, DROPOUT, sample_ids, positions, means, rstds,
            dx, du, dweight, dbias,
        )  # fmt: skip
    else:
        from tritonrec.kernels.norm_mul_dropout import numba_norm

        rows, dim = x.shape
        arguments = (
            *_flat(dy), *_flat(x), *_flat(u), *_vectors(weight, bias),
            *_draws(p, seed, sample_ids, positions), means.numpy(), rstds.numpy(),
            dx.view(-1).numpy(), *flat_rows(du), dweight.view(-1).numpy(), dbias.view(-1).numpy(),
        )  # fmt: skip

        def run(start: int, stop: int) -> None:
            numba_norm.backward(*arguments, np.uintp(start), np.uintp(stop), np.uintp(dim))

        over_ranges(run, rows, (80.0 if p else 40.0) * dx.numel())
    return dx, du, dweight, dbias


_NOTHING = np.empty(0, np.float32), np.uintp(0)
_NO_IDS = np.empty(0, np.int64)


def threshold_of(p: float) -> int:
    """A word below this is dropped."""
    return int(p * 2**32)


def _flat(matrix: torch.Tensor | None) -> tuple[np.ndarray, np.uintp]:
    if matrix is None:
        return _NOTHING
    return flat_rows(matrix if matrix.stride(-1) == 1 else matrix.contiguous())


def _vectors(weight: torch.Tensor, bias: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    return weight.detach().contiguous().numpy(), bias.detach().contiguous().numpy()


def _draws(
    p: float, seed: int, sample_ids: torch.Tensor | None, positions: torch.Tensor | None
) -> tuple[tuple[np.uint32, np.uint32, np.int64, np.uint64, np.float32], np.ndarray, np.ndarray]:
    k0, k1 = halves(seed)
    drawing = (
        np.uint32(k0), np.uint32(k1), np.int64(DROPOUT), np.uint64(threshold_of(p)), np.float32(1 / (1 - p))
    )  # fmt: skip
    if not p or sample_ids is None or positions is None:
        return drawing, _NO_IDS, _NO_IDS
    return drawing, sample_ids.contiguous().numpy(), positions.contiguous().numpy()


def _reference_mask(
    p: float, seed: int, sample_ids: torch.Tensor | None, positions: torch.Tensor | None, dim: int
) -> torch.Tensor | None:
    if not p or sample_ids is None or positions is None:
        return None
    return reference.mask(seed, DROPOUT, sample_ids, positions, dim, threshold_of(p), 1 / (1 - p))


@custom_op("tritonrec::norm_mul_dropout", mutates_args=())
def _norm_mul_dropout(
    x: torch.Tensor,
    u: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    p: float,
    seed: int,
    sample_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(x, u, weight, bias, p, sample_ids, positions)
    x, u = x.detach(), None if u is None else u.detach()
    return norm_forward(x, u, weight.detach(), bias.detach(), eps, p, seed, sample_ids, positions, impl)


@_norm_mul_dropout.register_fake
def _(x, u, weight, bias, eps, p, seed, sample_ids, positions, impl):
    return x.new_empty(x.shape), x.new_empty(x.shape[0]), x.new_empty(x.shape[0])


@custom_op("tritonrec::norm_mul_dropout_backward", mutates_args=())
def _norm_mul_dropout_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    u: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    p: float,
    seed: int,
    sample_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
    means: torch.Tensor,
    rstds: torch.Tensor,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(x, u, weight, bias, p, sample_ids, positions)
    _check_backward(dy, x, means, rstds)
    means, rstds = means.detach().contiguous(), rstds.detach().contiguous()
    dy, x, u = dy.detach(), x.detach(), None if u is None else u.detach()
    return norm_backward(dy, x, u, weight, bias, p, seed, sample_ids, positions, means, rstds, impl)


@_norm_mul_dropout_backward.register_fake
def _(dy, x, u, weight, bias, p, seed, sample_ids, positions, means, rstds, impl):
    def row_terms():
        return x.new_empty(x.shape)

    du = row_terms() if u is not None else x.new_empty(0, x.shape[1])
    return row_terms(), du, row_terms(), row_terms()


@custom_op("tritonrec::norm_mul_dropout_backward_into", mutates_args=("du",))
def _norm_mul_dropout_backward_into(
    du: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    p: float,
    seed: int,
    sample_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
    means: torch.Tensor,
    rstds: torch.Tensor,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_tensors(x=x, u=u, du=du)
    _check(x, u, weight, bias, p, sample_ids, positions)
    _check_backward(dy, x, means, rstds)
    check_matrix("du", du, torch.float32, in_place=True)
    check_shape("du", du, x.shape, x.dtype)
    read = {
        "dy": dy, "x": x, "u": u, "weight": weight, "bias": bias, "sample_ids": sample_ids,
        "positions": positions, "means": means, "rstds": rstds,
    }  # fmt: skip
    check_no_overlap({"du": du}, read)
    means, rstds = means.detach().contiguous(), rstds.detach().contiguous()
    dy, x, u = dy.detach(), x.detach(), u.detach()
    dx, _, dweight, dbias = norm_backward(
        dy, x, u, weight, bias, p, seed, sample_ids, positions, means, rstds, impl, du
    )
    return dx, dweight, dbias


@_norm_mul_dropout_backward_into.register_fake
def _(du, dy, x, u, weight, bias, p, seed, sample_ids, positions, means, rstds, impl):
    dx, dweight, dbias = (x.new_empty(x.shape) for _ in range(3))
    return dx, dweight, dbias


def _save(ctx, inputs, output):
    x, u, weight, bias, _, ctx.p, ctx.seed, sample_ids, positions, ctx.impl = inputs
    ctx.save_for_backward(x, u, weight, bias, sample_ids, positions, *output[1:])


def _backward(ctx, dy, dmean, drstd):
    x, u, weight, bias, sample_ids, positions, means, rstds = ctx.saved_tensors
    dx, du, dweight, dbias = _norm_mul_dropout_backward(
        dy, x, u, weight, bias, ctx.p, ctx.seed, sample_ids, positions, means, rstds, ctx.impl
    )
    gate = None if u is None else du
    return dx, gate, dweight.sum(0), dbias.sum(0), None, None, None, None, None, None


_norm_mul_dropout.register_autograd(_backward, setup_context=_save)
