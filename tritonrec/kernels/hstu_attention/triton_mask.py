# mypy: ignore-errors
"""`masks.visible` in Triton: one mask function, and the blocks of keys or queries worth walking.

A query sees [0, prefix), [low, high) and [own, row]: tokens that the window does not hide, the history in its
window, and the targets of its group up to itself. `rules` are (target_group_size, max_attn_len,
min_full_attn_seq_len, attn_prefix_len, whether there are contextual tokens), and `contexts` a sequence's
number of those; a None compiles its rule away.

A walk is up to three runs of blocks: ``(total, start, cut, jump, cut, jump)``, the n-th block being start + n
plus each jump from its cut on. It holds every block with a visible pair, perhaps others. `whole` says of a
block that every pair of it is visible, and then no mask is computed.
"""

import triton
import triton.language as tl


@triton.jit
def shift_of(contexts):
    """Places that contextual tokens lose by counting as one."""
    return tl.maximum(contexts - 1, 0)


@triton.jit
def visible(row, column, history, contexts, rules):
    """Whether queries `row` see keys `column`, of two shapes that broadcast."""
    group, window, full, prefix, contextual = rules
    high = tl.minimum(row + 1, history)
    if contextual is not None:
        high = tl.where(row < contexts, history, high)
    seen = column < high
    if window is not None:
        at = tl.minimum(row, history)
        hides = (at > window + shift_of(contexts)) & ((full == 0) | (at < history - full))
        if contextual is not None:
            hides = hides & (row >= contexts)
        low = tl.where(hides, at - window, 0)
        seen = seen & ((column >= low) | (column < prefix))
    own = row
    if group is not None:
        own = tl.where(row < history, row, history + (row - history) // group * group)
    return seen | ((column >= own) & (column <= row))


@triton.jit
def whole(row, last_row, column, column_stop, history, rules):
    """Whether rows [row, last_row] all see columns [column, column_stop), both inside a sequence.

    A True is always right; some blocks that contextual tokens or a group see whole get a False.
    """
    _, window, full, prefix, _ = rules
    all_see = (column_stop <= row + 1) & (column_stop <= history)
    if window is not None:
        near = tl.minimum(last_row, history) - window <= column
        all_see = all_see & (near | ((full > 0) & (row >= history - full)) | (column_stop <= prefix))
    return all_see


@triton.jit
def join(start, stop, start_2, stop_2, start_3, stop_3):
    """The walk of three runs of blocks, later ones cut to begin behind earlier ones."""
    stop = tl.maximum(stop, start)
    start_2 = tl.maximum(start_2, stop)
    stop_2 = tl.maximum(stop_2, start_2)
    start_3 = tl.maximum(start_3, stop_2)
    stop_3 = tl.maximum(stop_3, start_3)
    cut = stop - start
    cut_2 = cut + stop_2 - start_2
    return cut_2 + stop_3 - start_3, start, cut, start_2 - stop, cut_2, start_3 - stop_2


@triton.jit
def block_of(n, walk):
    """The n-th block of a walk."""
    _, start, cut, jump, cut_2, jump_2 = walk
    return start + n + tl.where(n >= cut, jump, 0) + tl.where(n >= cut_2, jump_2, 0)


@triton.jit
def walk_of_rows(row, row_stop, history, contexts, rules, STEP: tl.constexpr):
    """Blocks of STEP keys that queries [row, row_stop) may see."""
    group, window, full, prefix, contextual = rules
    high = tl.minimum(row_stop, history)
    if contextual is not None:
        high = tl.where(row < contexts, history, high)
    low = 0
    head = 0
    if window is not None:
        at = tl.minimum(row, history)
        hides = at > window + shift_of(contexts)
        hides = hides & ((full == 0) | (tl.minimum(row_stop - 1, history) < history - full))
        if contextual is not None:
            hides = hides & (row >= contexts)
        low = tl.where(hides, at - window, 0)
        head = tl.minimum(prefix, low)
    own = tl.maximum(row, history)
    if group is not None:
        own = history + (own - history) // group * group
    tail = tl.where(row_stop > history, (row_stop + STEP - 1) // STEP, 0)
    return join(0, (head + STEP - 1) // STEP, low // STEP, (high + STEP - 1) // STEP, own // STEP, tail)


@triton.jit
def walk_of_columns(column, column_stop, length, history, contexts, hidden, rules, STEP: tl.constexpr):
    """Blocks of STEP queries, none before place `hidden`, that may see keys [column, column_stop)."""
    group, window, full, prefix, contextual = rules
    least = hidden // STEP
    early = 0
    if contextual is not None:
        early = tl.where(column < history, contexts, 0)
    reach = history
    late = history
    late_stop = length
    if window is not None:
        free = column < prefix
        shift = shift_of(contexts)
        by_window = tl.maximum(column_stop, shift + 1) + window
        reach = tl.where(free, history, tl.minimum(history, by_window))
        late = history - full
        near = free | (full > 0) | (column_stop > history - window) | (history - shift <= window)
        late_stop = tl.where(near, length, 0)
    group_stop = column_stop
    if group is not None:
        group_stop = history + (column_stop - history + group - 1) // group * group
    reach = tl.where(column_stop > history, tl.minimum(length, group_stop), reach)
    late_stop = tl.where(column < history, late_stop, 0)
    nearest = tl.maximum(column // STEP, least)
    return join(
        tl.where(early > 0, least, nearest), (early + STEP - 1) // STEP, nearest, (reach + STEP - 1) // STEP,
        tl.maximum(late // STEP, least), (late_stop + STEP - 1) // STEP,
    )  # fmt: skip
