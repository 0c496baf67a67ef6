"""Losses from logits whose value at a row depends on that row alone, bit for bit.

`torch.sigmoid` and `torch.nn.functional.softplus` compute the last elements of an array by another path than
the rest; `exp` and `log1p` do not, so everything here is made of those and of single operations.

Dimensions: L rows, T tasks; b queries, B candidates, d dimensions.
"""

from __future__ import annotations

import torch

from .. import ops
from ..kernels.autocast import widen
from ..settings import check_number, typed


@torch.no_grad()
def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) without overflow, precise in both tails, float32 or float64; not differentiable."""
    x = widen(x)
    e = torch.exp(-x.abs())
    return torch.where(x >= 0, torch.ones_like(e), e) / (1 + e)


def binary_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropies -y log s(z) - (1 - y) log(1 - s(z)) of each row, added from the first task to the last.

    Args:
        logits: z, (L, T), or (L,) of one task, float32 or of lower precision. labels: y, the same shape, any
            number type, in [0, 1].
    Returns:
        (L,) float32, >= 0. Differentiable in the logits.
    Raises:
        ValueError: shapes that do not fit.
    """
    if logits.dim() not in (1, 2) or labels.shape != logits.shape:
        shapes = f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"logits and labels must both be (L,) or (L, T), got {shapes}")
    logits, labels = (each[:, None] if each.dim() == 1 else each for each in (widen(logits), labels))
    return _BinaryCrossEntropy.apply(logits, labels.to(logits.dtype))


class _BinaryCrossEntropy(torch.autograd.Function):
    # Its own backward: max(z, 0) and |z| have no derivative at 0, where an untrained model's logits are.

    @staticmethod
    def forward(ctx, z, y):
        ctx.save_for_backward(z, y)
        losses = z.clamp(min=0) - z * y + torch.log1p(torch.exp(-z.abs()))
        total = z.new_zeros(z.shape[0])
        for task in losses.unbind(1):
            total = total + task
        return total

    @staticmethod
    def backward(ctx, dy):
        z, y = ctx.saved_tensors
        return dy[:, None] * ((1 - y) * sigmoid(z) - y * sigmoid(-z)), None


@typed
def in_batch_softmax(
    queries: torch.Tensor,
    candidates: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor | None = None,
    log_q: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Cross entropies of each query's own candidate among all candidates, which are other queries' own.

    A logit is ``<query, candidate> / temperature - log_q``, where q is the probability that a batch has the
    candidate: popular items are negatives more often (Yi et al., RecSys 2019, equation 3). A candidate with
    the id of the query's own is the same item, and none of its negatives.

    Args:
        queries: (b, d) float32 or of lower precision. candidates: (B, d).
        positions: (b,) int64, each query's own candidate. ids: (B,) of the candidates, None: all differ.
        log_q: (B,) float32, None: all are as likely.
    Returns:
        (b,) float32, each of its own row alone. Differentiable in queries and candidates.
    Raises:
        ValueError: a temperature that is not positive, shapes that do not fit.
    """
    check_number("temperature", temperature, positive=True)
    for name, each in (("ids", ids), ("log_q", log_q)):
        if each is not None and each.shape != candidates.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(each.shape)} for {len(candidates)} candidates")
    if positions.shape != queries.shape[:1]:
        raise ValueError(f"positions has shape {tuple(positions.shape)} for {len(queries)} queries")
    logits = widen(ops.linear(queries / temperature, candidates))
    if log_q is not None:
        logits = logits - log_q
    if ids is not None:
        same = ids == ids[positions].unsqueeze(1)
        same[torch.arange(len(positions), device=positions.device), positions] = False
        logits = logits.masked_fill(same, -torch.inf)
    return torch.nn.functional.cross_entropy(logits, positions, reduction="none")
