"""Jagged HSTU attention: pointwise SiLU instead of softmax, over sequences stored end to end.

    S = alpha * Q K^T,   P = silu(S) * mask / scaling_seqlen,   O = P V
    dV = P^T dO,   dS = (dO V^T) * sigmoid(S) * (1 + S * (1 - sigmoid(S))) * mask / scaling_seqlen
    dQ = alpha * dS K,   dK = alpha * dS^T Q

Source: Zhai et al., "Actions speak louder than words", ICML 2024, equation 2, without the relative bias.
Two sequences of lengths 3 and 2 and an empty one between them, seq_offsets = [0, 3, 3, 5]; the last one has
one target (t), which sees history and itself::

    L = 5 rows     0 1 2 | 3 4        mask    1 . . | . .
                   a a a | b t                1 1 . | . .
                                              1 1 1 | . .
                                              . . . | 1 .
                                              . . . | 1 1

The normaliser is an argument and never the longest sequence of the batch, and a sum runs along one sequence
in a fixed order: a sequence's output and gradients do not depend, bit for bit, on what it is batched with.
There are no atomics and no locks: dQ is summed by query rows, dK and dV by key rows. Only the inputs are
kept for backward; scores are computed again.

Dimensions: B sequences, L tokens, H heads, Dqk and Dv features of a head.
"""

from __future__ import annotations

import numpy as np
import torch

from tritonrec.kernels.dispatch import Impl, implementation
from tritonrec.kernels.hstu_attention import reference
from tritonrec.kernels.offsets import check_lengths, check_offsets
from tritonrec.kernels.workers import over_ranges

__all__ = ["attention_backward", "attention_forward", "hstu_attention"]


def hstu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    *,
    alpha: float,
    scaling_seqlen: int,
    num_targets: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Causal HSTU attention, diagonal included, over jagged sequences.

    Args:
        q, k: (L, H, Dqk). v: (L, H, Dv). One dtype: float32; bf16 and fp16 too in Triton. The last dimension
            contiguous, other strides free (slices of one projection will do).
        seq_offsets: (B + 1,) int32 or int64, sequence b owns rows seq_offsets[b] : seq_offsets[b + 1].
        max_seq_len: no sequence is longer; it sizes the launch and changes no value.
        alpha: factor of the scores. scaling_seqlen: the normaliser N >= 1, the same for every batch.
        num_targets: (B,) int32 or int64: the last so many tokens of a sequence see the tokens before them
            all and themselves, not each other.
    Returns:
        (L, H, Dv) of v's dtype. Differentiable in q, k and v.
    Raises:
        ValueError: shapes, dtypes, offsets, lengths or numbers of targets that do not fit.
    """
    if q.dim() != 3 or k.shape != q.shape or v.dim() != 3 or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"q and k must be (L, H, Dqk) and v (L, H, Dv), got q {tuple(q.shape)}, k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if scaling_seqlen < 1:
        raise ValueError(f"scaling_seqlen must be at least 1, got {scaling_seqlen}")
    if num_targets is not None and num_targets.shape != (seq_offsets.shape[0] - 1,):
        raise ValueError(f"num_targets must be ({seq_offsets.shape[0] - 1},), got {tuple(num_targets.shape)}")
    if num_targets is not None and num_targets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"num_targets must be int32 or int64, got {num_targets.dtype}")
    return _hstu_attention(q, k, v, seq_offsets, max_seq_len, alpha, scaling_seqlen, num_targets, impl)


def _check(seq_offsets: torch.Tensor, tokens: int, max_seq_len: int, targets: torch.Tensor | None) -> None:
    check_offsets("seq_offsets", seq_offsets, tokens)
    check_lengths(seq_offsets, max_seq_len)
    lengths = seq_offsets[1:] - seq_offsets[:-1]
    if seq_offsets.device.type != "cpu":
        if targets is not None:
            fits = ((targets >= 0) & (targets <= lengths)).all()
            torch._assert_async(fits, "num_targets must lie between 0 and a sequence's length")
        return
    if targets is not None:
        wrong = ((targets < 0) | (targets > lengths)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(
                f"num_targets[{at}] = {int(targets[at])} for a sequence of {int(lengths[at])} tokens"
            )


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    alpha: float,
    scaling_seqlen: int,
    num_targets: torch.Tensor | None,
    impl: str,
) -> torch.Tensor:
    """`hstu_attention` without the checks and the dispatcher: the door for hot callers."""
    chosen = implementation(impl, q)  # type: ignore[arg-type]
    if chosen == "reference":
        return reference.forward(
            q, k, v, seq_offsets, alpha, scaling_seqlen, _targets(num_targets, seq_offsets)
        )
    shape = (*q.shape[:2], v.shape[2])
    if q.numel() == 0 or v.numel() == 0:
        return v.new_zeros(shape)
    if chosen == "triton":
        from tritonrec.kernels.hstu_attention import triton_attention

        out = v.new_empty(shape)
        triton_attention.forward(q, k, v, seq_offsets, max_seq_len, alpha, scaling_seqlen, num_targets, out)
        return out
    from tritonrec.kernels.hstu_attention import numba_attention

    out = v.new_zeros(shape)
    offsets, targets, sizes, cost = _plan(q, v, seq_offsets, num_targets)
    arguments = (
        *_flat(q), *_flat(k), *_flat(v), offsets, targets, np.float32(alpha), np.float32(1 / scaling_seqlen),
        out.view(-1).numpy(),
    )  # fmt: skip

    def run(start: int, stop: int) -> None:
        numba_attention.forward(*arguments, np.uintp(start), np.uintp(stop), *sizes)

    over_ranges(run, len(targets), cost)
    return out


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    alpha: float,
    scaling_seqlen: int,
    num_targets: torch.Tensor | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, each contiguous."""
    chosen = implementation(impl, q)  # type: ignore[arg-type]
    if chosen == "reference":
        targets = _targets(num_targets, seq_offsets)
        return reference.backward(do, q, k, v, seq_offsets, alpha, scaling_seqlen, targets)
    if chosen == "triton" and q.numel() > 0 and v.numel() > 0:
        from tritonrec.kernels.hstu_attention import triton_attention

        dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (q, k, v))
        triton_attention.backward(
            do, q, k, v, seq_offsets, max_seq_len, alpha, scaling_seqlen, num_targets, dq, dk, dv
        )
        return dq, dk, dv
    dq, dk, dv = (tensor.new_zeros(tensor.shape) for tensor in (q, k, v))
    if q.numel() == 0 or v.numel() == 0:
        return dq, dk, dv
    from tritonrec.kernels.hstu_attention import numba_attention

    plan_offsets, plan_targets, sizes, cost = _plan(q, v, seq_offsets, num_targets)
    arguments = (
        *_flat(do), *_flat(q), *_flat(k), *_flat(v), plan_offsets, plan_targets, np.float32(alpha),
        np.float32(1 / scaling_seqlen), dq.view(-1).numpy(), dk.view(-1).numpy(), dv.view(-1).numpy(),
    )  # fmt: skip

    def run(start: int, stop: int) -> None:
        numba_attention.backward(*arguments, np.uintp(start), np.uintp(stop), *sizes)

    over_ranges(run, len(plan_targets), 2.5 * cost)
    return dq, dk, dv


def _targets(num_targets: torch.Tensor | None, seq_offsets: torch.Tensor) -> torch.Tensor:
    return seq_offsets.new_zeros(seq_offsets.shape[0] - 1) if num_targets is None else num_targets


def _flat(tensor: torch.Tensor) -> tuple[np.ndarray, np.uintp, np.uintp]:
    """(L, H, D) as a flat array: row (t, h) starts at t * token_stride + h * head_stride."""
    if tensor.stride(2) != 1:
        tensor = tensor.contiguous()
    tokens, heads, dim = tensor.shape
    length = (tokens - 1) * tensor.stride(0) + (heads - 1) * tensor.stride(1) + dim
    flat = tensor.detach().as_strided((length,), (1,)).numpy()
    return flat, np.uintp(tensor.stride(0)), np.uintp(tensor.stride(1))


def _plan(
    q: torch.Tensor, v: torch.Tensor, seq_offsets: torch.Tensor, num_targets: torch.Tensor | None
) -> tuple[np.ndarray, np.ndarray, tuple[np.uintp, ...], float]:
    if q.dtype != torch.float32:
        raise ValueError(f"hstu_attention on the CPU computes in float32, got {q.dtype}")
    offsets = seq_offsets.contiguous().numpy()
    lengths = np.diff(offsets).astype(np.float64)
    targets = _targets(num_targets, seq_offsets).contiguous().numpy()
    heads, dim_qk, dim_v = q.shape[1], q.shape[2], v.shape[2]
    sizes = tuple(map(np.uintp, (heads, dim_qk, dim_v, int(lengths.max()))))
    return offsets, targets, sizes, float((lengths * lengths).sum()) * heads * (dim_qk + dim_v)


@torch.library.custom_op("tritonrec::hstu_attention", mutates_args=())
def _hstu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    alpha: float,
    scaling_seqlen: int,
    num_targets: torch.Tensor | None,
    impl: str,
) -> torch.Tensor:
    _check(seq_offsets, q.shape[0], max_seq_len, num_targets)
    return attention_forward(
        q.detach(), k.detach(), v.detach(), seq_offsets, max_seq_len, alpha, scaling_seqlen, num_targets, impl
    )


@_hstu_attention.register_fake
def _(q, k, v, seq_offsets, max_seq_len, alpha, scaling_seqlen, num_targets, impl):
    return v.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.custom_op("tritonrec::hstu_attention_backward", mutates_args=())
def _hstu_attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    alpha: float,
    scaling_seqlen: int,
    num_targets: torch.Tensor | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return attention_backward(do, q, k, v, seq_offsets, max_seq_len, alpha, scaling_seqlen, num_targets, impl)


@_hstu_attention_backward.register_fake
def _(do, q, k, v, seq_offsets, max_seq_len, alpha, scaling_seqlen, num_targets, impl):
    return q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, seq_offsets, *ctx.numbers, num_targets, ctx.impl = inputs
    ctx.save_for_backward(q, k, v, seq_offsets, num_targets)


def _backward(ctx, do):
    q, k, v, seq_offsets, num_targets = ctx.saved_tensors
    dq, dk, dv = _hstu_attention_backward(do, q, k, v, seq_offsets, *ctx.numbers, num_targets, ctx.impl)
    return dq, dk, dv, None, None, None, None, None, None


_hstu_attention.register_autograd(_backward, setup_context=_save)
