"""The choice of rows by a policy where the table is: no wait for a number that the device knows.

Lists are as long as a bound that the host knows, and their first entries hold (`kernels.padding`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .select import AllReduce
from .selection import select, valid
from .stored_table import StoredTable

DIGITS = 256
_FIRST, _LAST = -(2**63), 2**63 - 1


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
