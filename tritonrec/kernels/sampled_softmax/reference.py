"""Sampled softmax, one token at a time."""

from __future__ import annotations

import torch


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


def sampled_softmax(
    hidden: torch.Tensor, positive: torch.Tensor, negatives: torch.Tensor, valid: torch.Tensor, scale: float,
    rows: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`tritonrec.kernels.sampled_softmax.op.sampled_softmax`, with scale = 1 / temperature."""
    if rows is not None:
        negatives = negatives[rows]
    losses = hidden.new_empty(len(hidden))
    for t in range(len(hidden)):
        score = scores(hidden, positive, negatives, valid, t, scale)
        losses[t] = torch.logsumexp(score, 0) - score[0]
    return losses


def sampled_softmax_backward(
    dloss: torch.Tensor, hidden: torch.Tensor, positive: torch.Tensor, negatives: torch.Tensor,
    valid: torch.Tensor, scale: float, rows: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
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
