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

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.fixed_point import FRACTION_BITS
from tritonrec.kernels.linear.register import LINEAR, LINEAR_WEIGHT_GRAD


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
