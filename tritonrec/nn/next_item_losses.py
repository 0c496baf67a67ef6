"""The ends of a next-item model in a trainer on the CPU: rows cut once, losses by sample in one call.

Dimensions: L tokens, K negatives, d model dimension, B samples.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..kernels.dispatch import implementation, is_compiling
from ..kernels.gradients import current
from ..kernels.op import annotation
from ..kernels.sampled_softmax import cpu_by_sample
from ..kernels.sampled_softmax.op import SAMPLED_SOFTMAX_BACKWARD
from .tokens import sum_by_sample


class _Split(torch.autograd.Function):
    """Rows [0, first) and the others. `_Losses` leaves room for the first before the others' gradient."""

    @staticmethod
    def forward(ctx: Any, rows, first: int):
        ctx.first, ctx.num_rows = first, len(rows)
        ctx.set_materialize_grads(False)
        return rows[:first], rows[first:]

    @staticmethod
    def backward(ctx: Any, dfirst, dothers):
        given = dfirst if dothers is None else dothers
        if given is None:
            return None, None
        whole = getattr(dothers, "end_of", None)  # no other tensor's memory is written
        if whole is None:
            whole = given.new_zeros(ctx.num_rows, given.shape[1])
            if dothers is not None:
                whole[ctx.first :] = dothers
        if dfirst is None:
            whole[: ctx.first].zero_()
        else:
            whole[: ctx.first] = dfirst
        return whole, None


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bound: cpu_by_sample.Bound, first: int, hidden, items):
        ctx.bound, ctx.first = bound, first
        ctx.save_for_backward(hidden, items)
        with annotation("sampled_softmax_by_sample"):
            return bound.forward(hidden, items)

    @staticmethod
    def backward(ctx: Any, dlosses):
        hidden, items = ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative of these gradients is refused by the op
            return None, None, *_backward(ctx.bound, dlosses, hidden, items)
        whole = items.new_empty(ctx.first + len(items), items.shape[1])
        ditems = whole[ctx.first :]
        ditems.end_of = whole  # for `_Split`; what autograd adds up or copies has no such attribute
        with annotation("sampled_softmax_by_sample_backward"):
            dhidden = ctx.bound.backward(dlosses.resolve_neg().contiguous(), hidden, items, ditems)
        return None, None, dhidden, ditems


def _backward(
    bound: cpu_by_sample.Bound, dlosses: torch.Tensor, hidden: torch.Tensor, items: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `hidden` and `items`, by the op."""
    of_tokens = dlosses.repeat_interleave(bound.offsets.diff())
    labels, sampled = items.split([len(hidden), len(items) - len(hidden)])
    sampled = sampled.view(*bound.valid.shape, -1)
    dhidden, *ditems = SAMPLED_SOFTMAX_BACKWARD(of_tokens, hidden, labels, sampled, bound.valid, bound.scale)
    return dhidden, torch.cat([each.view(-1, hidden.shape[1]) for each in ditems])


def _in_trainer() -> bool:
    return not is_compiling() and current() is not None and torch.is_grad_enabled()


def split(rows: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [0, first) and the others of (n, d), whose gradients a trainer does not copy together."""
    if not _in_trainer() or not rows.requires_grad:
        return rows[:first], rows[first:]
    return _Split.apply(rows, first)


def losses_by_sample(
    hidden: torch.Tensor,
    items: torch.Tensor,
    valid: torch.Tensor,
    offsets: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Sums (B,) of the sampled-softmax losses of each sample's tokens.

    Args:
        hidden: (L, d). items: (L + L K, d), of the labels, then of the negatives.
        valid: (L, K) bool, as of `ops.sampled_softmax`. offsets: (B + 1,).
    """
    tokens, negatives = valid.shape
    if _in_trainer() and temperature > 0 and implementation("auto", hidden) == "cpu":
        bound = cpu_by_sample.bind(hidden, items, valid, offsets, 1 / temperature)
        if bound is not None:
            return _Losses.apply(bound, tokens, hidden, items)
    labels, sampled = items.split([tokens, tokens * negatives])
    losses = ops.sampled_softmax(
        hidden, labels, sampled.unflatten(0, (tokens, negatives)), valid, temperature
    )
    return sum_by_sample(losses, offsets)
