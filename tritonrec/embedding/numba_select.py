# mypy: ignore-errors
"""Passes over all keys of a table, for sweeps."""

from ..kernels.caches import njit


@njit(cache=True, nogil=True)
def unpinned(keys, handles, pinned, metadata, left_keys, left_handles, values):
    """Copy keys, handles and metadata of the rows that are not pinned; returns how many they are."""
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
    """Choose candidates below their group's edge, and at it where it is taken whole; how many are `kept`,
    those at the edge of a group that goes on."""
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
