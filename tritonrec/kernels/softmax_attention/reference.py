"""Softmax attention one sequence and head at a time, with the weights spelled out; any float dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from tritonrec.kernels.norm_mul_dropout.reference import mask
from tritonrec.kernels.philox import DROPOUT


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


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *described
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


def softmax_attention_backward(
    do: torch.Tensor, out: torch.Tensor, most: torch.Tensor, total: torch.Tensor, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, *described,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
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
