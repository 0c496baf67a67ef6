# mypy: ignore-errors
"""Sampled softmax in Triton: one program walks one token's negatives in tiles of a fixed shape.

    L tokens, K negatives, D features; a tile holds ITEMS negatives and all D features

Negatives are read where they lie: side by side for each token, or with `rows` at rows of a matrix. A row's
gradient is slope * hidden, so with `rows` backward writes the slopes alone.

The maximum and the sum of exponentials are carried from tile to tile (an online softmax), backward walks the
tiles once more for the slopes. Nothing a program computes depends on another token, and there are no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonrec.kernels.row_layout import contiguous_rows
from tritonrec.kernels.triton_float import divide, exp
from tritonrec.kernels.triton_jit import jit_for_any_alignment

MOST_PROGRAMS = 65535  # a launch may have no more along an axis
TILE = 4096  # elements of a tile of negatives


@triton.jit
def item_scores(
    hidden, negatives_ptr, row_stride, rows_ptr, valid_ptr, token, first, scale, count, dim,
    ITEMS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows (ITEMS, D) of negatives from `first` on and their scores, -inf where one is not valid."""
    item = first + tl.arange(0, ITEMS)
    column = tl.arange(0, BLOCK_D)
    # token is int64, and so is the product: negatives of all tokens may pass 2**31 elements
    row = token * count + item
    if rows_ptr is not None:
        row = tl.load(rows_ptr + row, mask=item < count, other=0)
    at = row[:, None] * row_stride + column[None, :]
    inside = (item < count)[:, None] & (column < dim)[None, :]
    rows = tl.load(negatives_ptr + at, mask=inside, other=0.0)
    valid = tl.load(valid_ptr + token * count + item, mask=item < count, other=0) != 0
    score = tl.sum(rows * hidden[None, :], axis=1) * scale
    return rows, tl.where(valid, score, float("-inf")), at, inside


@triton.jit
def normaliser(
    hidden, positive, negatives_ptr, row_stride, rows_ptr, valid_ptr, token, scale, count, dim,
    ITEMS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Score of the label, the greatest score, and the sum of exponentials below it."""
    score_0 = tl.sum(hidden * positive, axis=0) * scale
    # begins with the label, whose term is exp(0) = 1, so no maximum is -inf
    most = score_0
    total = tl.full((), 1.0, tl.float32)
    for first in range(tl.full((), 0, tl.int64), count, ITEMS):
        _, score, _, _ = item_scores(
            hidden, negatives_ptr, row_stride, rows_ptr, valid_ptr, token, first, scale, count, dim, ITEMS,
            BLOCK_D,
        )  # fmt: skip
        # what was summed below the old maximum is brought below the new one, so no exponential overflows
        higher = tl.maximum(most, tl.max(score, axis=0))
        # `exp` ends at e**-87, so the term of -inf has to be set to 0
        terms = tl.where(score == float("-inf"), 0.0, exp(score - higher))
        total = total * exp(most - higher) + tl.sum(terms, axis=0)
        most = higher
    return score_0, most, total


@jit_for_any_alignment
def forward_kernel(
    hidden_ptr, positive_ptr, negatives_ptr, row_stride, rows_ptr, valid_ptr, losses_ptr, scale, tokens,
    count, dim, ITEMS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """loss = log(sum of exp(scores - most)) - (score of the label - most)."""
    column = tl.arange(0, BLOCK_D)
    start = tl.program_id(0).to(tl.int64)  # an int64 bound makes the loop's variable int64
    for token in range(start, tokens, tl.num_programs(0)):
        at = token * dim + column
        hidden = tl.load(hidden_ptr + at, mask=column < dim, other=0.0)
        positive = tl.load(positive_ptr + at, mask=column < dim, other=0.0)
        score_0, most, total = normaliser(
            hidden, positive, negatives_ptr, row_stride, rows_ptr, valid_ptr, token, scale, count, dim, ITEMS,
            BLOCK_D,
        )  # fmt: skip
        tl.store(losses_ptr + token, tl.log(total) - (score_0 - most))


@jit_for_any_alignment
def backward_kernel(
    dloss_ptr, hidden_ptr, positive_ptr, negatives_ptr, row_stride, rows_ptr, valid_ptr, dhidden_ptr,
    dpositive_ptr, dnegatives_ptr, scale, tokens, count, dim, ITEMS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """slope = dloss * scale * (softmax - [label]); a row's gradient is slope * hidden.

    With `rows_ptr` `dnegatives_ptr` takes the slopes.
    """
    column = tl.arange(0, BLOCK_D)
    start = tl.program_id(0).to(tl.int64)
    for token in range(start, tokens, tl.num_programs(0)):
        at = token * dim + column
        hidden = tl.load(hidden_ptr + at, mask=column < dim, other=0.0)
        positive = tl.load(positive_ptr + at, mask=column < dim, other=0.0)
        score_0, most, total = normaliser(
            hidden, positive, negatives_ptr, row_stride, rows_ptr, valid_ptr, token, scale, count, dim, ITEMS,
            BLOCK_D,
        )  # fmt: skip
        factor = tl.load(dloss_ptr + token) * scale
        slope_0 = (divide(exp(score_0 - most), total) - 1.0) * factor
        dhidden = slope_0 * positive
        tl.store(dpositive_ptr + at, slope_0 * hidden, mask=column < dim)
        # scores are computed again, since L * K of them would have to be stored
        for first in range(tl.full((), 0, tl.int64), count, ITEMS):
            rows, score, place, inside = item_scores(
                hidden, negatives_ptr, row_stride, rows_ptr, valid_ptr, token, first, scale, count, dim,
                ITEMS, BLOCK_D,
            )  # fmt: skip
            weight = tl.div_rn(exp(score - most), tl.full((ITEMS,), 0.0, tl.float32) + total)
            slope = tl.where(score == float("-inf"), 0.0, weight) * factor
            dhidden += tl.sum(slope[:, None] * rows, axis=0)
            if rows_ptr is None:
                tl.store(dnegatives_ptr + place, slope[:, None] * hidden[None, :], mask=inside)
            else:
                item = first + tl.arange(0, ITEMS)
                tl.store(dnegatives_ptr + token * count + item, slope, mask=item < count)
        tl.store(dhidden_ptr + at, dhidden, mask=column < dim)


def _tile(count: int, dim: int) -> dict[str, int]:
    """Tile of negatives, by K and D alone: a power of two of them, at most TILE elements."""
    block = triton.next_power_of_2(max(dim, 1))
    items = min(triton.next_power_of_2(max(count, 1)), max(1, TILE // block))
    return {"BLOCK_D": block, "ITEMS": items, "num_warps": 4, "enable_fp_fusion": False}


def _negatives(
    negatives: torch.Tensor, rows: torch.Tensor | None
) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """The matrix that holds the negatives, its row stride, and which of its rows they are."""
    if rows is None:
        return negatives.contiguous(), negatives.shape[2], None
    matrix = contiguous_rows(negatives)
    return matrix, matrix.stride(0), rows.contiguous()


def sampled_softmax(hidden, positive, negatives, valid, scale, rows) -> torch.Tensor:
    """`tritonrec.kernels.sampled_softmax.op.sampled_softmax`, with scale = 1 / temperature."""
    hidden, positive, valid = (t.contiguous() for t in (hidden, positive, valid))
    losses = hidden.new_empty(len(hidden))
    (tokens, count), dim = valid.shape, hidden.shape[1]
    if tokens:
        forward_kernel[(min(tokens, MOST_PROGRAMS),)](
            hidden, positive, *_negatives(negatives, rows), valid, losses, scale, tokens, count, dim,
            **_tile(count, dim),
        )  # fmt: skip
    return losses


def sampled_softmax_backward(
    dloss, hidden, positive, negatives, valid, scale, rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.sampled_softmax.op.sampled_softmax_backward_reference`."""
    hidden, positive, valid = (t.contiguous() for t in (hidden, positive, valid))
    dhidden, dpositive = map(torch.empty_like, (hidden, positive))
    last = hidden.new_empty(negatives.shape if rows is None else valid.shape)
    (tokens, count), dim = valid.shape, hidden.shape[1]
    if tokens:
        backward_kernel[(min(tokens, MOST_PROGRAMS),)](
            dloss.contiguous(), hidden, positive, *_negatives(negatives, rows), valid, dhidden, dpositive,
            last, scale, tokens, count, dim, **_tile(count, dim),
        )  # fmt: skip
    return dhidden, dpositive, last
