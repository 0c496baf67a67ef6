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

from collections.abc import Callable
from typing import Any

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import FLOAT32, LOW
from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.fixed_point.errors import check_fraction_bits
from tritonrec.kernels.gradients import targets_of
from tritonrec.kernels.op import Op
from tritonrec.kernels.philox.reference import DROPOUT, halves, philox4x32
from tritonrec.kernels.row_layout import check_matrix
from tritonrec.kernels.row_terms import RowTerms, add_terms


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
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """u * layer_norm(x), with dropout keyed by what it is for.

    Args:
        x: (L, D) float32, bf16 or fp16. u: (L, D) of x's dtype or None, which stands for ones (a plain layer
            norm). Rows contiguous.
        weight, bias: (D,), float32 or of x's dtype. eps: added to the variance.
        dropout: probability p that an element is zeroed, 0 <= p < 1; only while `training`.
        seed: int64. sample_ids, positions: (L,) int64 per token, of which positions count by their low
            32 bits; needed where there is dropout.
    Returns:
        (L, D) of x's dtype. Differentiable in x, u, weight and bias.
    Raises:
        ValueError: shapes, dtypes or p that do not fit.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
    p = dropout if training else 0.0
    if not p:
        sample_ids = positions = None
    return NORM_MUL_DROPOUT(x, u, weight, bias, eps, p, seed, sample_ids, positions, impl=impl)[0]


# Reference: norm, gate and dropout, one row at a time.


def kept_columns(seed: int, tag: int, sample: int, position: int, dim: int, threshold: int) -> list[bool]:
    """Which columns of a row survive: word d % 4 of Philox block d // 4 is at least the threshold."""
    key, low_high, place = halves(seed), halves(sample), position & 0xFFFFFFFF
    words = [w for block in range((dim + 3) // 4) for w in philox4x32((*low_high, tag | block, place), key)]
    return [word >= threshold for word in words[:dim]]


def mask(
    seed: int,
    tag: int,
    samples: torch.Tensor,
    positions: torch.Tensor,
    dim: int,
    threshold: int,
    factor: float,
) -> torch.Tensor:
    """(L, D): `factor` where a column survives, else 0."""
    pairs = zip(samples.tolist(), positions.tolist(), strict=True)
    rows = [kept_columns(seed, tag, sample, position, dim, threshold) for sample, position in pairs]
    return torch.tensor(rows, dtype=torch.float32, device=samples.device).view(-1, dim) * factor


def kept_of(
    x: torch.Tensor, p: float, seed: int, sample_ids: torch.Tensor | None, positions: torch.Tensor | None
) -> torch.Tensor | None:
    """The mask for rows x (L, D), None without dropout."""
    if not p or sample_ids is None or positions is None or x.numel() == 0:
        return None
    return mask(seed, DROPOUT, sample_ids, positions, x.shape[1], int(p * 2**32), 1 / (1 - p))


def norm_mul_dropout_reference(
    x, u, weight, bias, eps, p, seed, sample_ids, positions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y (L, D), and means and rstds (L,) of the rows of x."""
    y, means, rstds = x.new_empty(x.shape), x.new_zeros(len(x)), x.new_zeros(len(x))
    kept = kept_of(x, p, seed, sample_ids, positions)
    for t, row in enumerate(x if x.numel() else ()):
        means[t] = row.sum() / len(row)
        centred = row - means[t]
        rstds[t] = 1 / torch.sqrt((centred * centred).sum() / len(row) + eps)
        y[t] = centred * rstds[t] * weight + bias
        if u is not None:
            y[t] = u[t] * y[t]
        if kept is not None:
            y[t] = y[t] * kept[t]
    return y, means, rstds


def norm_mul_dropout_backward(
    backward_into: Callable[..., tuple[torch.Tensor, ...]], dy: torch.Tensor, x: torch.Tensor,
    u: torch.Tensor | None, *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dx, du (of no rows without u), and each token's terms of dweight and dbias, all (L, D)."""
    du = x.new_empty(x.shape) if u is not None else x.new_empty(0, x.shape[1])
    dx, dweight, dbias = backward_into(du, dy, x, u, *rest)
    return dx, du, dweight, dbias


def norm_mul_dropout_backward_into_reference(
    du, dy, x, u, weight, bias, p, seed, sample_ids, positions, means, rstds
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx and the terms of dweight and dbias; overwrites du."""
    dx, dweight, dbias = (x.new_empty(x.shape) for _ in range(3))
    kept = kept_of(x, p, seed, sample_ids, positions)
    for t, row in enumerate(x):
        g = dy[t] if kept is None else dy[t] * kept[t]
        normed = (row - means[t]) * rstds[t]
        if u is not None:
            du[t] = g * (normed * weight + bias)
            g = g * u[t]
        dbias[t] = g
        dweight[t] = g * normed
        #     normed = (x - mean) * rstd     dx = rstd * (slope - mean(slope) - normed * mean(slope normed))
        slope = g * weight
        level, along = slope.sum() / len(row), (slope * normed).sum() / len(row)
        dx[t] = rstds[t] * (slope - level - normed * along)
    return dx, dweight, dbias


def by_terms(
    backward_into: Callable[..., tuple[torch.Tensor, ...]], impl: Impl
) -> Callable[..., torch.Tensor]:
    """`norm_mul_dropout_backward_exact` by the op into du, whose terms are rounded and added afterwards."""

    def norm_mul_dropout_backward_exact(
        weight_sums: torch.Tensor, bias_sums: torch.Tensor, du: torch.Tensor | None, dy: torch.Tensor,
        x: torch.Tensor, *rest: Any,
    ) -> torch.Tensor:  # fmt: skip
        """dx; overwrites du, which is None without u; dweight and dbias are added to int64 sums (D,)."""
        *given, fraction_bits, names = rest
        into = x.new_empty(0, x.shape[1]) if du is None else du
        dx, *terms = backward_into(into, dy, x, *given)
        add_terms((weight_sums, bias_sums), terms, fraction_bits, names, impl)
        return dx

    return norm_mul_dropout_backward_exact


norm_mul_dropout_backward_exact_reference = by_terms(norm_mul_dropout_backward_into_reference, "reference")


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
    reference=norm_mul_dropout_reference, cpu="numba_norm:norm_mul_dropout",
    triton="triton_norm:norm_mul_dropout", check=_check, fake=_fake, save=_save, backward=_backward,
    widens=True, autocast=dict.fromkeys(("x", "u", "weight", "bias"), FLOAT32),
)  # fmt: skip
NORM_MUL_DROPOUT_BACKWARD_INTO = Op(
    "norm_mul_dropout_backward_into(Tensor(a!) du, Tensor dy, Tensor x, Tensor u, Tensor weight, "
    "Tensor bias, float p, int seed, Tensor? sample_ids, Tensor? positions, Tensor means, Tensor rstds) "
    "-> (Tensor, Tensor, Tensor)",
    reference=norm_mul_dropout_backward_into_reference, cpu="numba_norm:norm_mul_dropout_backward_into",
    triton="triton_norm:norm_mul_dropout_backward_into",
    check=(_check, _check_backward, _check_du), fake=_fake_backward_into, widens=True,
)  # fmt: skip
NORM_MUL_DROPOUT_BACKWARD = Op(
    "norm_mul_dropout_backward(Tensor dy, Tensor x, Tensor? u, Tensor weight, Tensor bias, float p, "
    "int seed, Tensor? sample_ids, Tensor? positions, Tensor means, Tensor rstds) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=norm_mul_dropout_backward, over=NORM_MUL_DROPOUT_BACKWARD_INTO,
    check=(_check, _check_backward), fake=_fake_backward, widens=True,
)  # fmt: skip
NORM_MUL_DROPOUT_BACKWARD_EXACT = Op(
    "norm_mul_dropout_backward_exact(Tensor(a!) weight_sums, Tensor(b!) bias_sums, Tensor(c!)? du, "
    "Tensor dy, Tensor x, Tensor? u, Tensor weight, Tensor bias, float p, int seed, Tensor? sample_ids, "
    "Tensor? positions, Tensor means, Tensor rstds, int fraction_bits, str[] names) -> Tensor",
    reference=norm_mul_dropout_backward_exact_reference,
    cpu="numba_norm:norm_mul_dropout_backward_exact", triton="triton_norm:norm_mul_dropout_backward_exact",
    check=(_check, _check_backward, _check_gate, _check_sums), fake=lambda x: x.new_empty(x.shape),
    widens=True,
)  # fmt: skip
