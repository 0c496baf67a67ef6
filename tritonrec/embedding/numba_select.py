# mypy: ignore-errors
"""Loops over all keys of a table, for eviction and demotion passes."""

from ..kernels.caches import njit


@njit(cache=True, nogil=True)
def unpinned(keys, handles, pinned, metadata, left_keys, left_handles, values):
    """Copy keys, handles and metadata of the rows that are not pinned; returns their number."""
    count = 0
    for i in range(len(keys)):
        left_keys[count] = keys[i]
        left_handles[count] = handles[i]
        values[count] = metadata[handles[i]]
        count += not pinned[handles[i]]
    return count


@njit(cache=True, nogil=True)
def count_digits(words, groups, candidates, shift, flip, counts):
    """``counts[group, digit]`` of the candidates' eight bits from `shift` on, some of them flipped."""
    for candidate in candidates:
        digit = ((words[candidate] >> shift) & 255) ^ flip
        counts[groups[candidate], digit] += 1


@njit(cache=True, nogil=True)
def take_below(words, groups, candidates, shift, flip, edge, whole, unfinished, chosen, kept):
    """Choose the candidates below their group's edge digit, and those at the edge of a `whole` group. Copy
    the undecided ones, at the edge of an unfinished group, to `kept`; returns their number."""
    count = 0
    for candidate in candidates:
        group = groups[candidate]
        digit = ((words[candidate] >> shift) & 255) ^ flip
        if digit < edge[group] or (digit == edge[group] and whole[group]):
            chosen[candidate] = True
        elif digit == edge[group] and unfinished[group]:
            kept[count] = candidate
            count += 1
    return count
