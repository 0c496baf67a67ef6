"""Registration of `softmax_attention` and its derivative."""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape, check_whole
from tritonrec.kernels.autocast import FLOAT32, LOW, LOWER
from tritonrec.kernels.offsets import (
    check_lengths,
    check_max_seq_len,
    check_offsets,
    check_offsets_shape,
)
from tritonrec.kernels.op import Op
from tritonrec.kernels.softmax_attention import reference


def _check(q, k, v, seq_offsets, key_offsets, max_seq_len, bias, p, sample_ids) -> None:
    check_whole(max_seq_len=max_seq_len)
    check_max_seq_len(max_seq_len)
    check_offsets_shape("seq_offsets", seq_offsets)
    sequences = seq_offsets.shape[0] - 1
    three = q.dim() == k.dim() == v.dim() == 3
    if not three or k.shape[1:] != q.shape[1:] or v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"q must be (M, H, D), k (L, H, D) and v (L, H, E), got q {tuple(q.shape)}, k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}"
        )
    if key_offsets is not None:
        check_offsets_shape("key_offsets", key_offsets)
        if key_offsets.shape[0] != sequences + 1:
            raise ValueError(f"key_offsets must be ({sequences + 1},), got {tuple(key_offsets.shape)}")
    elif q.shape[0] != k.shape[0]:
        raise ValueError(f"q has {len(q)} rows and k {len(k)}: give key_offsets")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float32, *LOW):
        raise ValueError(
            f"q, k and v must share float32, bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if bias is not None:
        if bias.dim() != 4 or bias.shape[:2] != (sequences, q.shape[1]) or bias.dtype != torch.float32:
            raise ValueError(
                f"bias must be ({sequences}, {q.shape[1]}, I, J) float32, got {tuple(bias.shape)} "
                f"{bias.dtype}"
            )
        if bias.requires_grad:
            raise ValueError("bias gets no gradient: detach it; ops.hstu_attention has learned biases")
    if not 0 <= p < 1:
        raise ValueError(f"dropout must lie in [0, 1), got {p}")
    if sample_ids is None:
        fits, got = not p, "None"
    else:
        fits = sample_ids.shape == (sequences,) and sample_ids.dtype == torch.int64
        got = f"{tuple(sample_ids.shape)} {sample_ids.dtype}"
    if not fits:
        raise ValueError(f"with dropout, sample_ids must be ({sequences},) int64, got {got}")


def _check_backward(do, out, most, total, q, v) -> None:
    check_shape("do", do, (*q.shape[:2], v.shape[2]), v.dtype)
    check_shape("out", out, (*q.shape[:2], v.shape[2]), v.dtype)
    check_shape("most", most, q.shape[:2], torch.float32)
    check_shape("total", total, q.shape[:2], torch.float32)


def _check_sequences(q, k, seq_offsets, key_offsets, max_seq_len, bias) -> None:
    queries, keys = (max_seq_len, max_seq_len) if bias is None else bias.shape[2:]
    check_offsets("seq_offsets", seq_offsets, q.shape[0])
    check_lengths(seq_offsets, min(max_seq_len, queries))
    key_offsets = seq_offsets if key_offsets is None else key_offsets
    check_offsets("key_offsets", key_offsets, k.shape[0])
    check_lengths(key_offsets, min(max_seq_len, keys))


def _fake(q, v):
    most, total = (torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2))
    return q.new_empty(*q.shape[:2], v.shape[2]), most, total


def _save(ctx, inputs, output):
    q, k, v, seq_offsets, key_offsets, *ctx.numbers, bias, ctx.p, ctx.seed, sample_ids, ctx.impl = inputs
    ctx.save_for_backward(*output, q, k, v, seq_offsets, key_offsets, bias, sample_ids)


def _backward(ctx, do, _dmost, _dtotal):
    *saved, bias, sample_ids = ctx.saved_tensors
    gradients = SOFTMAX_ATTENTION_BACKWARD(
        do, *saved, *ctx.numbers, bias, ctx.p, ctx.seed, sample_ids, impl=ctx.impl
    )
    return *gradients, *(None,) * 9


_REST = (
    "Tensor q, Tensor k, Tensor v, Tensor seq_offsets, Tensor? key_offsets, int max_seq_len, float scale, "
    "bool causal, Tensor? bias, float p, int seed, Tensor? sample_ids"
)
SOFTMAX_ATTENTION = Op(
    f"softmax_attention({_REST}) -> (Tensor, Tensor, Tensor)",
    reference=reference.softmax_attention, cpu="numba_softmax_attention:softmax_attention",
    triton="triton_softmax_attention:softmax_attention", check=_check, check_memory=_check_sequences,
    fake=_fake, save=_save, backward=_backward, widens=True,
    autocast={"q": LOWER, "k": LOWER, "v": LOWER, "bias": FLOAT32},
)  # fmt: skip
SOFTMAX_ATTENTION_BACKWARD = Op(
    f"softmax_attention_backward(Tensor do, Tensor out, Tensor most, Tensor total, {_REST}) "
    "-> (Tensor, Tensor, Tensor)",
    reference=reference.softmax_attention_backward,
    cpu="numba_softmax_attention:softmax_attention_backward",
    triton="triton_softmax_attention:softmax_attention_backward", check=(_check, _check_backward),
    check_memory=_check_sequences,
    fake=lambda q, k, v: tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v)), widens=True,
)  # fmt: skip
