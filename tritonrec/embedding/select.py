"""Which keys of all ranks have the smallest scores: a radix select that exchanges counts, never keys."""

from __future__ import annotations

from collections.abc import Callable

import torch

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums an int64 tensor over the ranks; every rank calls it equally often, with equal shapes."""


def select_smallest(
    scores: torch.Tensor,
    ids: torch.Tensor,
    groups: torch.Tensor,
    wanted: torch.Tensor,
    all_reduce: AllReduce | None = None,
) -> torch.Tensor:
    """Choose in each group the ``wanted[group]`` smallest (score, id), all ranks together.

    Eight bits at a time from the top: count how many candidates have each digit, sum the counts over the
    ranks, take all below the digit where the sum reaches what is wanted, go on with those that have it. The
    outcome depends on the union of the ranks' candidates only. At most 12 rounds, mostly 2 to 5.

    Args:
        scores: (K,) int32 or int64 within int32. ids: (K,) int64, ordered as signed numbers; distinct in a
            group over all ranks.
        groups: (K,) int64 in [0, G).
        wanted: (G,) int64, the same on every rank; a group with fewer candidates gives them all.
        all_reduce: sums (G, 256) counts over the ranks; None for a single rank.

    Returns:
        (K,) bool, the chosen ones of this rank.
    """
    chosen = torch.zeros(len(ids), dtype=torch.bool)
    remaining = wanted.clone()
    candidates = (remaining > 0)[groups].nonzero().squeeze(1)
    digits = [(scores.to(torch.int64), shift, shift == 24) for shift in (24, 16, 8, 0)]
    digits += [(ids, shift, shift == 56) for shift in range(56, -1, -8)]
    for word, shift, top in digits:
        if not bool((remaining > 0).any()):
            break
        digit = (word[candidates] >> shift) & 255
        if top:
            digit ^= 128  # negative numbers come first
        group = groups[candidates]
        counts = torch.bincount(group * 256 + digit, minlength=256 * len(wanted)).view(-1, 256)
        if all_reduce is not None:
            counts = all_reduce(counts)
        reached = counts.cumsum(1)
        # The first digit with which a group has enough; 256 where all its candidates are not.
        edge = (reached < remaining.unsqueeze(1)).sum(1)
        before = torch.cat([reached.new_zeros(len(wanted), 1), reached], 1).gather(1, edge.unsqueeze(1))
        remaining -= before.squeeze(1)
        at_edge = torch.cat([counts, counts.new_zeros(len(wanted), 1)], 1).gather(1, edge.unsqueeze(1))
        whole = at_edge.squeeze(1) == remaining
        remaining[whole | (edge == 256)] = 0
        chosen[candidates[(digit < edge[group]) | ((digit == edge[group]) & whole[group])]] = True
        candidates = candidates[(digit == edge[group]) & (remaining > 0)[group]]
    return chosen
