"""Dot products of all pairs of a sample's vectors: the interaction of DLRM (arXiv 1906.00091, section 2.1.3).

    out[b, p] = <x[b, i], x[b, j]>                        p = i (i - 1) / 2 + j,  j < i
    dx[b, i] = sum over j of  dy[b, p of i and j] * x[b, j]

Four vectors have the pairs (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2), the triangle below the diagonal
by rows. A sample's sums run in one order, whatever it is batched with, so its bits depend on that sample
alone (``torch.bmm`` chooses its code by the address where a sample begins, or by the size of the batch).

Dimensions: B samples, V vectors of each, D columns, P = V (V - 1) / 2 pairs.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import LOW, LOWER
from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.op import Op

MOST = 4096
"""Vectors of a sample: then a place in a sample's pairs is far below 2**31."""


def dot_interaction(vectors: torch.Tensor, *, impl: Impl = "auto") -> torch.Tensor:
    """Dot products of all pairs of vectors of each sample.

    Args:
        vectors: (B, V, D) float32, bf16 or fp16, V at most 4096.
    Returns:
        (B, V (V - 1) / 2) of the dtype of `vectors`, in the order (1, 0), (2, 0), (2, 1), (3, 0), ...
        Differentiable once. Sums are float32.
    Raises:
        ValueError: a shape or dtype that does not fit.
    """
    return DOT_INTERACTION(vectors, impl=impl)


# Reference: one pair at a time.


def dot_interaction_reference(vectors: torch.Tensor) -> torch.Tensor:
    """See `dot_interaction`."""
    count = vectors.shape[1]
    pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(count) for j in range(i)]
    return torch.stack(pairs, 1) if pairs else vectors.new_empty(vectors.shape[0], 0)


def dot_interaction_backward_reference(dy: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """(B, V, D): each pair's gradient reaches both of its vectors."""
    out, pair = torch.zeros_like(vectors, memory_format=torch.contiguous_format), 0
    for i in range(vectors.shape[1]):
        for j in range(i):
            out[:, i] += dy[:, pair, None] * vectors[:, j]
            out[:, j] += dy[:, pair, None] * vectors[:, i]
            pair += 1
    return out


def _check(vectors) -> None:
    if vectors.dim() != 3 or vectors.dtype not in (torch.float32, *LOW):
        raise ValueError(
            f"vectors must be (B, V, D) float32, bfloat16 or float16, got {tuple(vectors.shape)} "
            f"{vectors.dtype}"
        )
    if vectors.shape[1] > MOST:
        raise ValueError(f"a sample may have at most {MOST} vectors, got {vectors.shape[1]}")


def _check_backward(dy, vectors) -> None:
    check_shape("dy", dy, _shape(vectors), vectors.dtype)


def _shape(vectors) -> tuple[int, int]:
    samples, count, _ = vectors.shape
    return samples, count * (count - 1) // 2


def _save(ctx, inputs, output):
    vectors, ctx.impl = inputs
    ctx.save_for_backward(vectors)


def _backward(ctx, dy):
    return DOT_INTERACTION_BACKWARD(dy, *ctx.saved_tensors, impl=ctx.impl)


DOT_INTERACTION = Op(
    "dot_interaction(Tensor vectors) -> Tensor",
    reference=dot_interaction_reference, cpu="numba_dot_interaction:dot_interaction",
    triton="triton_dot_interaction:dot_interaction", check=_check,
    fake=lambda vectors: vectors.new_empty(_shape(vectors)), save=_save, backward=_backward,
    widens=True, autocast={"vectors": LOWER},
)  # fmt: skip
DOT_INTERACTION_BACKWARD = Op(
    "dot_interaction_backward(Tensor dy, Tensor vectors) -> Tensor",
    reference=dot_interaction_backward_reference, cpu="numba_dot_interaction:dot_interaction_backward",
    triton="triton_dot_interaction:dot_interaction_backward", check=(_check, _check_backward),
    fake=lambda vectors: vectors.new_empty(vectors.shape), widens=True,
)  # fmt: skip
