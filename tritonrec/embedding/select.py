"""Rows that a policy may choose, and the choice of the smallest scores over all ranks.

The choice is a radix select that exchanges counts, never keys.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from . import numba_select
from .row_column import RowColumn
from .stored_table import StoredTable

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Collective: sums an int64 tensor over the ranks, with equal shapes on all of them."""


def select_smallest(
    scores: torch.Tensor,
    ids: torch.Tensor,
    groups: torch.Tensor,
    k: torch.Tensor,
    all_reduce: AllReduce | None = None,
) -> torch.Tensor:
    """Choose in each group the ``k[group]`` smallest (score, id), all ranks together.

    Each round takes eight bits, from the top: count the candidates by digit, sum the counts over the ranks,
    choose all below the digit where the sum reaches k, and go on with the candidates that have that digit.
    The result depends on the union of the ranks' candidates only. At most 12 rounds, mostly 2 to 5.

    Args:
        scores: (K,) int32 or int64 within int32. ids: (K,) int64, ordered as signed numbers; distinct in a
            group over all ranks.
        groups: (K,) int64 in [0, G).
        k: (G,) int64, the same on every rank; in a group with fewer candidates all are chosen.
        all_reduce: sums (G, 256) counts over the ranks; None for a single rank.

    Returns:
        (K,) bool, the chosen ones of this rank.
    """
    # A round looks at one digit of the candidates, here of one group that has to lose k = 5:
    #     digit            0    1    2    3  ...
    #     counts           2    1    4    7         summed over the ranks
    #     reached          2    3    7   14         3 of digits 0 and 1 are chosen, and 2 are left to find
    #                                               among the 4 of digit 2 by the next digit
    chosen = np.zeros(len(ids), np.bool_)
    remaining = k.clone()
    belongs = groups.contiguous().numpy()
    candidates = (remaining > 0)[groups].nonzero().squeeze(1).numpy()
    words = ((scores.to(torch.int64).numpy(), 24), (ids.contiguous().numpy(), 56))
    rounds = [(word, shift, shift == top) for word, top in words for shift in range(top, -1, -8)]
    for word, shift, signed in rounds:
        if not bool((remaining > 0).any()):
            break
        flip = 128 if signed else 0  # negative numbers come first
        counts = torch.zeros(len(k), 256, dtype=torch.int64, device="cpu")
        numba_select.count_digits(word, belongs, candidates, shift, flip, counts.numpy())
        if all_reduce is not None:
            counts = all_reduce(counts)
        reached = counts.cumsum(1)
        # The first digit with which a group has enough; 256 where it has too few candidates.
        edge = (reached < remaining.unsqueeze(1)).sum(1)
        none = reached.new_zeros(len(k), 1)
        # reached before the edge's digit: [0, reached] is shifted by one.
        remaining -= torch.cat([none, reached], 1).gather(1, edge.unsqueeze(1)).squeeze(1)
        whole = torch.cat([counts, none], 1).gather(1, edge.unsqueeze(1)).squeeze(1) == remaining
        # `whole`: all candidates of that digit are wanted; 256: the group has no more candidates than k.
        remaining[whole | (edge == 256)] = 0
        kept = np.empty_like(candidates)
        count = numba_select.take_below(
            word, belongs, candidates, shift, flip, edge.numpy(), whole.numpy(), (remaining > 0).numpy(),
            chosen, kept,
        )  # fmt: skip
        candidates = kept[:count]
    return torch.from_numpy(chosen)


def unpinned_rows(
    rows: StoredTable, pinned: torch.Tensor, metadata: RowColumn
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys (n,), handles (n,) and metadata (n,) of every row of a table in host memory, but those of the
    handles `pinned` (P,).

    Rows in the pipeline's buffers are pinned; a handle of -1 pins nothing.
    """
    keys, handles = rows.items()
    numbers = metadata.rows
    marks = torch.zeros(rows.end, dtype=torch.bool, device="cpu")
    marks[pinned[pinned >= 0]] = True
    left_keys, left_handles = torch.empty_like(keys), torch.empty_like(handles)
    values = torch.empty(len(keys), dtype=numbers.dtype, device="cpu")
    count = numba_select.unpinned(
        keys.numpy(), handles.numpy(), marks.numpy(), numbers.numpy(),
        left_keys.numpy(), left_handles.numpy(), values.numpy(),
    )  # fmt: skip
    return left_keys[:count], left_handles[:count], values[:count]
