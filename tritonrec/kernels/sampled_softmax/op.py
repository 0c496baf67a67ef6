"""Sampled-softmax cross entropy of each token: its label against K sampled items.

    z_0 = <hidden, positive> / temperature,   z_k = <hidden, negative_k> / temperature
    loss = log(sum over k of exp(z_k)) - z_0

A negative that happens to be the label is left out of the sum (`valid`). Sums run along one token in a fixed
order: losses and gradients do not depend, bit for bit, on what else is in the batch.

With `rows` the negatives are rows of a matrix, read where they lie: no (L, K, D) tensor exists, neither of
negatives nor of their gradients. Three tokens, two negatives each::

    rows       4  0        negatives of token 0 = negatives[4], negatives[0]
               0  2
               4  4        a row may occur many times; its gradient is the sum over all places

Dimensions: L tokens, K negatives per token, D features, R rows. Source of the loss: Zhai et al., "Actions
speak louder than words", ICML 2024, section 4.1.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import FLOAT32
from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.op import Op
from tritonrec.kernels.row_layout import check_rows
from tritonrec.kernels.rows.op import ProductTerms
from tritonrec.settings import check_number


def sampled_softmax(
    hidden: torch.Tensor,
    positive: torch.Tensor,
    negatives: torch.Tensor,
    valid: torch.Tensor,
    temperature: float = 1.0,
    *,
    rows: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Cross entropy of each token's label among its sampled items.

    Args:
        hidden: (L, D) float32. positive: (L, D), the label's row. negatives: (L, K, D), with `rows` (R, D).
        valid: (L, K) bool, False leaves a negative out.
        temperature: divides the scores, > 0.
        rows: (L, K) int64 in [0, R), the row of each negative.
    Returns:
        (L,) float32, >= 0, with the bits of ``negatives[rows]`` given as negatives. Differentiable in hidden,
        positive and negatives; with `rows` the gradient of a row of negatives is the float32 sum over its
        places in their order, as of `gather_rows`.
    Raises:
        IndexError: a row is outside [0, R) (on an accelerator: an asynchronous device assertion).
        ValueError: shapes, dtypes or a temperature that do not fit.
    """
    check_number("temperature", temperature, positive=True)
    return SAMPLED_SOFTMAX(hidden, positive, negatives, valid, 1 / temperature, rows, impl=impl)


# Reference: sampled softmax, one token at a time.


def scores(
    hidden: torch.Tensor,
    positive: torch.Tensor,
    negatives: torch.Tensor,
    valid: torch.Tensor,
    t: int,
    scale: float,
) -> torch.Tensor:
    """(1 + K,): scaled scores of the positive and the negatives of token t; -inf where not valid."""
    rows = torch.cat([positive[t : t + 1], negatives[t]])
    score = (rows * hidden[t]).sum(1) * scale
    score[1:] = torch.where(valid[t], score[1:], -torch.inf)
    return score


def sampled_softmax_reference(hidden, positive, negatives, valid, scale, rows) -> torch.Tensor:
    """`tritonrec.kernels.sampled_softmax.op.sampled_softmax`, with scale = 1 / temperature."""
    if rows is not None:
        negatives = negatives[rows]
    losses = hidden.new_empty(len(hidden))
    for t in range(len(hidden)):
        score = scores(hidden, positive, negatives, valid, t, scale)
        losses[t] = torch.logsumexp(score, 0) - score[0]
    return losses


def sampled_softmax_backward_reference(
    dloss, hidden, positive, negatives, valid, scale, rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dhidden, dpositive, dnegatives, each contiguous.

    With `rows` slopes (L, K) for dnegatives: what ``hidden[l]`` is multiplied by for ``rows[l, k]``.
    """
    if rows is not None:
        negatives = negatives[rows]
    dhidden, dpositive, dnegatives = map(torch.empty_like, (hidden, positive, negatives))
    slopes = hidden.new_empty(valid.shape)
    for t in range(len(hidden)):
        slope = torch.softmax(scores(hidden, positive, negatives, valid, t, scale), 0)
        slope[0] -= 1
        slope = slope * dloss[t] * scale
        dhidden[t] = slope @ torch.cat([positive[t : t + 1], negatives[t]])
        dpositive[t] = slope[0] * hidden[t]
        dnegatives[t] = torch.outer(slope[1:], hidden[t])
        slopes[t] = slope[1:]
    return dhidden, dpositive, dnegatives if rows is None else slopes


def _check(hidden, positive, negatives, valid, rows) -> None:
    apart = negatives.dim() == 3 and negatives.shape[:2] == valid.shape
    matrix = negatives.dim() == 2 and rows is not None and rows.shape == valid.shape
    if (
        hidden.dim() != 2
        or positive.shape != hidden.shape
        or valid.dim() != 2
        or valid.shape[0] != hidden.shape[0]
        or not (apart if rows is None else matrix)
        or negatives.shape[-1] != hidden.shape[1]
    ):
        expected, given = "negatives (L, K, D) and valid (L, K)", [hidden, positive, negatives, valid]
        if rows is not None:
            expected, given = "negatives (R, D), and valid and rows (L, K)", [*given, rows]
        raise ValueError(
            f"hidden and positive must be (L, D), {expected}, got "
            f"{', '.join(str(tuple(each.shape)) for each in given)}"
        )
    if (
        any(tensor.dtype != torch.float32 for tensor in (hidden, positive, negatives))
        or valid.dtype != torch.bool
    ):
        raise ValueError(
            f"hidden, positive and negatives must be float32 and valid bool, got "
            f"{hidden.dtype}, {positive.dtype}, {negatives.dtype}, {valid.dtype}"
        )
    if rows is not None and rows.dtype != torch.int64:
        raise ValueError(f"rows must be int64, got {rows.dtype}")


def _check_memory(negatives, rows) -> None:
    if rows is not None:
        check_rows("rows", rows.reshape(-1), negatives.shape[0])


def _check_backward(dloss, hidden) -> None:
    check_shape("dloss", dloss, hidden.shape[:1], hidden.dtype)


def _fake_backward(hidden, positive, negatives, valid, rows):
    shapes = hidden.shape, positive.shape, negatives.shape if rows is None else valid.shape
    return tuple(hidden.new_empty(shape) for shape in shapes)


def _save(ctx, inputs, output):
    *tensors, ctx.scale, rows, ctx.impl = inputs
    ctx.save_for_backward(*tensors, rows)


def _backward(ctx, dloss):
    *tensors, rows = ctx.saved_tensors
    *gradients, last = SAMPLED_SOFTMAX_BACKWARD(dloss, *tensors, ctx.scale, rows, impl=ctx.impl)
    if rows is not None:
        hidden, _, negatives, _ = tensors
        last = ProductTerms(hidden, last, rows, len(negatives), ctx.impl)
    return *gradients, last, None, None, None


SAMPLED_SOFTMAX = Op(
    "sampled_softmax(Tensor hidden, Tensor positive, Tensor negatives, Tensor valid, float scale, "
    "Tensor? rows) -> Tensor",
    reference=sampled_softmax_reference, cpu="numba_softmax:sampled_softmax",
    triton="triton_softmax:sampled_softmax", check=_check, check_memory=_check_memory,
    fake=lambda hidden: hidden.new_empty(hidden.shape[0]), save=_save, backward=_backward,
    autocast=dict.fromkeys(("hidden", "positive", "negatives"), FLOAT32),
)  # fmt: skip
SAMPLED_SOFTMAX_BACKWARD = Op(
    "sampled_softmax_backward(Tensor dloss, Tensor hidden, Tensor positive, Tensor negatives, Tensor valid, "
    "float scale, Tensor? rows) -> (Tensor, Tensor, Tensor)",
    reference=sampled_softmax_backward_reference, cpu="numba_softmax:sampled_softmax_backward",
    triton="triton_softmax:sampled_softmax_backward", check=(_check, _check_backward),
    check_memory=_check_memory, fake=_fake_backward,
)  # fmt: skip
