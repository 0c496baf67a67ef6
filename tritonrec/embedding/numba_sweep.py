# mypy: ignore-errors
"""Passes over all keys of a table, for sweeps."""

from ..kernels.caches import njit


@njit(cache=True, nogil=True)
def unpinned(keys, rows, full_note, half_note, full_pinned, half_pinned, free_keys, notes):
    """Copy the keys whose rows are not pinned, and what is noted about them; how many they are.

    Row numbers from 2**30 on are those of `half_note` and `half_pinned`.
    """
    count = 0
    for i in range(len(keys)):
        if rows[i] >= 1 << 30:
            row = rows[i] - (1 << 30)
            pinned, note = half_pinned[row], half_note[row]
        else:
            pinned, note = full_pinned[rows[i]], full_note[rows[i]]
        free_keys[count] = keys[i]
        notes[count] = note
        count += not pinned
    return count


@njit(cache=True, nogil=True)
def count_digits(words, groups, candidates, shift, flip, counts):
    """``counts[group, digit]`` of the candidates' eight bits from `shift` on, some of them flipped."""
    for candidate in candidates:
        digit = ((words[candidate] >> shift) & 255) ^ flip
        counts[groups[candidate], digit] += 1


@njit(cache=True, nogil=True)
def take_below(words, groups, candidates, shift, flip, edge, whole, going_on, chosen, kept):
    """Choose candidates below their group's edge, and at it where it is taken whole; how many are `kept`,
    those at the edge of a group that goes on."""
    count = 0
    for candidate in candidates:
        group = groups[candidate]
        digit = ((words[candidate] >> shift) & 255) ^ flip
        if digit < edge[group] or (digit == edge[group] and whole[group]):
            chosen[candidate] = True
        elif digit == edge[group] and going_on[group]:
            kept[count] = candidate
            count += 1
    return count
