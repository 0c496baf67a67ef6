"""Softmax attention over sequences stored end to end, each in a fixed order of its own.

    s[i, j] = scale * <q[i, h], k[j, h]> + bias[b, h, i, j]        where query i sees key j, else -inf
    p = softmax over j of s,   out[i, h] = sum over j of  p[i, j] * kept[i, j] * v[j, h]
    dv[j] = sum over i of  p[i, j] kept[i, j] do[i]
    ds[i, j] = p[i, j] (kept[i, j] <do[i], v[j]> - <do[i], out[i]>)
    dq[i] = scale * sum over j of ds[i, j] k[j],   dk[j] = scale * sum over i of ds[i, j] q[i]

A query that sees no key has the output 0 and no gradient. With `causal` query i sees keys j <= i. A padded
batch (B, T, H, D) is the case of equal lengths, and its padding is a bias of -inf.

No (L, L) matrix exists but the bias that a caller gives. Sums run along one sequence: a sequence's outputs
and gradients do not depend, bit for bit, on what it is batched with, and there are no atomics. Dropout of the
weights is a function of (seed, sample, head, i, j): head h draws under ``seed + 2**32 h``, where query i is
the position and key j the column of `tritonrec.ops.dropout`.

Dimensions: B sequences, M queries, L keys, H heads, D and E features of a head.
Source: Vaswani et al., "Attention is all you need", NeurIPS 2017, equation 1; backward and the running
maximum as in Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from tritonrec.kernels.arguments import as_float, check_shape, check_tensors, check_whole
from tritonrec.kernels.autocast import FLOAT32, LOW, LOWER
from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.norm_mul_dropout.op import mask
from tritonrec.kernels.offsets import check_lengths, check_max_seq_len, check_offsets, check_offsets_shape
from tritonrec.kernels.op import Op
from tritonrec.kernels.philox.reference import DROPOUT


def softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    sample_ids: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Attention of each sequence's queries to its own keys.

    Args:
        q: (M, H, D). k: (L, H, D). v: (L, H, E). One dtype, float32, bf16 or fp16; the last dimension
            contiguous, other strides free.
        seq_offsets: (B + 1,) int32 or int64, sequence b owns queries seq_offsets[b] : seq_offsets[b + 1].
        max_seq_len: no sequence has more queries or keys; it sizes the launch and changes no value.
        causal: query i sees keys up to place i. scale: of the products; None: D ** -0.5.
        key_offsets: as `seq_offsets`, of the keys; None: the same.
        bias: (B, H, I, J) float32, any strides (``expand`` is free), added to the scores of query i < I and
            key j < J; -inf hides a key. It gets no gradient.
        dropout: probability p that a weight is zeroed, 0 <= p < 1. seed: int64. sample_ids: (B,) int64,
            needed where there is dropout.
    Returns:
        (M, H, E) of v's dtype. Differentiable in q, k and v.
    Raises:
        ValueError: shapes, dtypes, offsets or lengths that do not fit.
    """
    if scale is None:
        check_tensors(q=q)
        scale = max(q.shape[-1], 1) ** -0.5 if q.dim() else 1.0
    out, _, _ = SOFTMAX_ATTENTION(
        q, k, v, seq_offsets, key_offsets, max_seq_len, as_float("scale", scale), causal, bias,
        as_float("dropout", dropout), seed, sample_ids, impl=impl,
    )  # fmt: skip
    return out


# Reference: one sequence and head at a time, with the weights spelled out; any float dtype.


class Call(NamedTuple):
    """The arguments of the registered op after q, k and v, in the order of its schema."""

    q_offsets: torch.Tensor
    key_offsets: torch.Tensor | None
    max_seq_len: int
    scale: float
    causal: bool
    bias: torch.Tensor | None
    p: float
    seed: int
    sample_ids: torch.Tensor | None

    @property
    def k_offsets(self) -> torch.Tensor:
        return self.q_offsets if self.key_offsets is None else self.key_offsets

    def sequences(self) -> Iterator[tuple[int, slice, slice]]:
        """Number, queries and keys of each sequence."""
        q, k = self.q_offsets.tolist(), self.k_offsets.tolist()
        for b in range(len(q) - 1):
            yield b, slice(q[b], q[b + 1]), slice(k[b], k[b + 1])

    def scores(self, q: torch.Tensor, k: torch.Tensor, b: int, h: int) -> torch.Tensor:
        """(i, j) of one sequence and head, -inf where the key is hidden."""
        scores = (q @ k.t()) * self.scale
        if self.bias is not None:
            scores = scores + self.bias[b, h, : len(q), : len(k)]
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
        return scores

    def kept(self, scores: torch.Tensor, b: int, h: int) -> torch.Tensor:
        """1 / (1 - p) or 0 for each pair."""
        if not self.p or self.sample_ids is None or scores.numel() == 0:
            return torch.ones_like(scores)
        rows = torch.arange(len(scores), device=scores.device)
        samples = self.sample_ids[b].expand(len(scores))
        factors = mask(
            self.seed + (h << 32), DROPOUT, samples, rows, scores.shape[1], int(self.p * 2**32),
            1 / (1 - self.p),
        )  # fmt: skip
        return factors.to(scores.dtype)


def softmax_attention_reference(q, k, v, *described) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out (M, H, E), and for each query and head its greatest score and the sum of exponentials, (M, H)."""
    call = Call(*described)
    out = v.new_zeros(*q.shape[:2], v.shape[2])
    most, total = q.new_zeros(q.shape[:2]), q.new_ones(q.shape[:2])
    for b, queries, keys in call.sequences():
        for h in range(q.shape[1]):
            scores = call.scores(q[queries, h], k[keys, h], b, h)
            if scores.numel() == 0:
                continue
            highest = scores.amax(1)
            highest = torch.where(highest == -torch.inf, 0.0, highest)
            terms = torch.exp(scores - highest[:, None])
            sums = terms.sum(1)
            sums = torch.where(sums == 0, 1.0, sums)
            out[queries, h] = (terms / sums[:, None] * call.kept(scores, b, h)) @ v[keys, h]
            most[queries, h], total[queries, h] = highest, sums
    return out, most, total


def softmax_attention_backward_reference(
    do, out, most, total, q, k, v, *described
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, contiguous."""
    call = Call(*described)
    dq, dk, dv = (tensor.new_zeros(tensor.shape) for tensor in (q, k, v))
    for b, queries, keys in call.sequences():
        for h in range(q.shape[1]):
            scores = call.scores(q[queries, h], k[keys, h], b, h)
            if scores.numel() == 0:
                continue
            p = torch.exp(scores - most[queries, h, None]) / total[queries, h, None]
            kept = call.kept(scores, b, h)
            slope = (do[queries, h] @ v[keys, h].t()) * kept
            ds = p * (slope - (p * slope).sum(1, keepdim=True)) * call.scale
            dq[queries, h] = ds @ k[keys, h]
            dk[keys, h] = ds.t() @ q[queries, h]
            dv[keys, h] = (p * kept).t() @ do[queries, h]
    return dq, dk, dv


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
    # A bias (B, H, I, J) has I rows and J columns: no sequence may reach beyond them.
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
    reference=softmax_attention_reference, cpu="numba_softmax_attention:softmax_attention",
    triton="triton_softmax_attention:softmax_attention", check=_check, check_memory=_check_sequences,
    fake=_fake, save=_save, backward=_backward, widens=True,
    autocast={"q": LOWER, "k": LOWER, "v": LOWER, "bias": FLOAT32},
)  # fmt: skip
SOFTMAX_ATTENTION_BACKWARD = Op(
    f"softmax_attention_backward(Tensor do, Tensor out, Tensor most, Tensor total, {_REST}) "
    "-> (Tensor, Tensor, Tensor)",
    reference=softmax_attention_backward_reference,
    cpu="numba_softmax_attention:softmax_attention_backward",
    triton="triton_softmax_attention:softmax_attention_backward", check=(_check, _check_backward),
    check_memory=_check_sequences,
    fake=lambda q, k, v: tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v)), widens=True,
)  # fmt: skip
