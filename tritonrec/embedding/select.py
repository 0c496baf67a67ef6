"""Rows that a policy may choose, and the choice of the smallest scores over all ranks.

The choice is a radix select that exchanges counts, never keys. It is there twice: for tables in host memory,
which end as soon as it is clear, and for tables on a device, where nothing waits for a number that the device
knows: their lists are as long as a bound that the host knows, and the first entries hold (`kernels.padding`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from . import numba_select
from .selection import select, valid
from .shared_state import RowColumn
from .stored_table import StoredTable

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Collective: sums an int64 tensor over the ranks, with equal shapes on all of them."""
DIGITS = 256
_FIRST, _LAST = -(2**63), 2**63 - 1


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


def unpinned_slots(
    rows: StoredTable, pinned: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys (S,) and handles (S,) of all slots of a padded table, and which (S,) bool have a row that is not
    among the handles `pinned` (P,).
    """
    keys, handles = rows.slots_in_order()
    marks = torch.zeros(rows.end + 1, dtype=torch.bool, device=rows.device)
    marks[pinned] = True  # the last mark is that of no row
    return keys, handles, (handles >= 0) & ~marks[handles]


def chosen_slots(mask: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions (most,) where `mask` (S,) bool holds at most `most` times, and () int64, how often."""
    found = select(mask, padded=True)
    assert found.count is not None
    return found.positions[:most], found.count


def in_order_of_keys(
    keys: torch.Tensor, positions: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`keys` (L,) and `positions` (L,) in ascending order of the keys, those behind the count last."""
    inside = valid(len(keys), count, keys.device)
    # stable: a key that is the greatest number stays before those behind the count
    keys, order = torch.where(inside, keys, _LAST).sort(stable=True)
    return keys, positions[order]


def smallest_slots(
    scores: torch.Tensor,
    keys: torch.Tensor,
    groups: torch.Tensor,
    among: torch.Tensor,
    k: list[int],
    all_reduce: AllReduce | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`select_smallest` without a wait: in each group the ``k[group]`` smallest (score, key), all ranks
    together.

    Sorted, a group's candidates lie side by side, so that the choice of a rank is a range of positions. Over
    several ranks 12 rounds of eight bits narrow down where it ends, each with one sum of counts.

    Args:
        scores: (S,) int32. keys: (S,) int64, distinct in a group over all ranks; of several groups those of
            the first are smaller.
        groups: (S,) int64 in [0, G). among: (S,) bool, the candidates.
        k: G numbers, the same on every rank. all_reduce: see `select_smallest`.

    Returns:
        Positions (L,) of the chosen ones first, and () int64, their number; ``L <= sum(k)``.
    """
    group = torch.where(among, groups, len(k))
    order = keys.argsort()
    # word    | group | score + 2**31 |    sorted by group, then score; the stable sort keeps keys ascending
    # Groups G and up are no candidates and come last.
    word = ((group << 32) + scores + 2**31)[order]
    word, by_word = word.sort(stable=True)
    order = order[by_word]
    edges = torch.arange(len(k) + 1, device=keys.device) << 32
    bounds = torch.searchsorted(word, edges)
    begin, end = bounds[:-1], bounds[1:]
    if all_reduce is None:
        # A single rank: the first k of each group's range are the smallest.
        asked = torch.stack([torch.full_like(begin[0], min(each, len(keys))) for each in k])
        end = torch.minimum(end, begin + asked)
    else:
        end = _end_of_share(word, keys[order], begin, end, k, all_reduce)
    lengths = [min(each, len(keys)) for each in k]
    places = [at + torch.arange(size, device=keys.device) for at, size in zip(begin, lengths, strict=True)]
    place = torch.cat(places)
    chosen = torch.cat([here < last for here, last in zip(places, end, strict=True)])
    found = select(chosen, padded=True)
    assert found.count is not None
    return order[found.take(place).clamp(max=len(keys) - 1)], found.count


def _end_of_share(
    word: torch.Tensor,
    keys: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    k: list[int],
    all_reduce: AllReduce,
) -> torch.Tensor:
    """(G,) int64, where this rank's chosen ones end.

    Args:
        word: (S,) int64, ascending: group and score. keys: (S,) int64, ascending where words are equal.
        begin, end: (G,) int64, the positions of each group's candidates.
    """
    remaining = torch.stack([torch.full_like(begin[0], each) for each in k])
    prefix = torch.arange(len(k), device=word.device) << 32
    begin, end, remaining = _narrowed(word, begin, end, prefix, (24, 16, 8, 0), remaining, all_reduce)
    # a group's candidates of one score are left; other positions take the key before them
    group = (word >> 32).clamp(max=len(k) - 1)
    place = torch.arange(len(word), device=word.device)
    left = (place >= begin[group]) & (place < end[group])
    # Ascending as a whole, as `searchsorted` needs: between two groups' candidates the last key is repeated.
    ascending = torch.where(left, keys, _FIRST).cummax(0).values
    prefix, shifts = torch.full_like(begin, _FIRST), range(56, -1, -8)
    begin, end, remaining = _narrowed(ascending, begin, end, prefix, shifts, remaining, all_reduce)
    return torch.where(remaining > 0, end, begin)


def _narrowed(
    values: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    prefix: torch.Tensor,
    shifts: Iterable[int],
    remaining: torch.Tensor,
    all_reduce: AllReduce,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The candidates of the one value at which a group has enough, found digit by digit: where they begin and
    end (G,), and how many (G,) of them to choose. All candidates before them are chosen.

    One round, of three ranks whose candidates of a group have the digits below, of which 4 are to be chosen::

        digit       0   1   2   3        the sums reach 4 at digit 1: both candidates of digit 0 are chosen,
        rank 0      1   2   -   1        and 2 of the four with digit 1, of which the next round looks at the
        rank 1      -   1   3   -        digit behind
        rank 2      1   1   -   2
        sums        2   6   9  12

    Args:
        values: (S,) int64; those of a group's candidates, from `begin` (G,) to `end` (G,), ascend and begin
            with the `prefix` (G,). shifts: of the digits, eight bits each, from the highest one.
        remaining: (G,) int64, how many of the candidates to choose.
    """
    digits = torch.arange(DIGITS, device=values.device)
    for shift in shifts:
        asked = prefix.unsqueeze(1) + (digits << shift)
        found = torch.searchsorted(values, asked.contiguous())
        found = torch.minimum(torch.maximum(found, begin.unsqueeze(1)), end.unsqueeze(1))
        found = torch.cat([found, end.unsqueeze(1)], 1)  # where each digit begins, and the end
        reached = all_reduce(found.diff(dim=1)).cumsum(1)
        none = reached.new_zeros(len(prefix), 1)
        # 256 where a group has too few: all of them are chosen, and nothing is left to narrow down
        edge = (reached < remaining.unsqueeze(1)).sum(1, keepdim=True)
        remaining = remaining - torch.cat([none, reached], 1).gather(1, edge).squeeze(1)
        found = torch.cat([found, end.unsqueeze(1)], 1)
        begin, end = found.gather(1, edge).squeeze(1), found.gather(1, edge + 1).squeeze(1)
        prefix = prefix + (digits << shift)[edge.squeeze(1).clamp(max=DIGITS - 1)]
    return begin, end, remaining
