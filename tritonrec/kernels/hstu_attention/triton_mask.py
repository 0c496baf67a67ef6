# mypy: ignore-errors
"""`masks.visible` in Triton: one mask function, and the blocks of keys or queries worth walking.

A query sees [0, prefix), [low, high) and [own, row]: tokens that the window does not hide, the history in its
window, and the targets of its group up to itself. A None in `Rules` compiles its rule away; `contexts` are a
sequence's contextual tokens.

A walk is up to three runs of blocks, the n-th block being start + n plus each jump from its cut on. It holds
every block with a visible pair, perhaps others. Long sequences have most blocks below the diagonal, whose
every pair is visible: loops of their own walk these, and compute no mask. (A branch around the mask in one
loop would be none: compilers compute both sides of it and select.)
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Rules(NamedTuple):
    """The numbers of a mask (`call.HSTUMask`)."""

    group: int | None  # target_group_size, None for 1
    window: int | None  # max_attn_len, None without
    full: int  # min_full_attn_seq_len
    prefix: int  # attn_prefix_len
    contextual: int | None  # 1 where there are contextual tokens


class Walk(NamedTuple):
    """Blocks to visit."""

    count: int
    start: int
    cut: int
    jump: int
    cut_2: int
    jump_2: int


@triton.jit
def shift_of(contexts):
    """Places that contextual tokens lose by counting as one."""
    return tl.maximum(contexts - 1, 0)


@triton.jit
def visible(row, column, history, contexts, rules):
    """Whether queries `row` see keys `column`, of two shapes that broadcast."""
    high = tl.minimum(row + 1, history)
    if rules.contextual is not None:
        high = tl.where(row < contexts, history, high)
    seen = column < high
    if rules.window is not None:
        at = tl.minimum(row, history)
        hides = (at > rules.window + shift_of(contexts)) & ((rules.full == 0) | (at < history - rules.full))
        if rules.contextual is not None:
            hides = hides & (row >= contexts)
        low = tl.where(hides, at - rules.window, 0)
        seen = seen & ((column >= low) | (column < rules.prefix))
    # a target sees its group up to itself, and a token of the history itself
    own = row
    if rules.group is not None:
        own = tl.where(row < history, row, history + (row - history) // rules.group * rules.group)
    return seen | ((column >= own) & (column <= row))


@triton.jit
def clear_keys(row, history, rules, BLOCK_N: tl.constexpr):
    """How many blocks at the beginning of `key_blocks` are seen whole by all queries from `row` on.

    Where windows are, none: a walk then has few blocks between two that need the mask.
    """
    if rules.window is not None:
        return 0
    else:
        return tl.minimum(row + 1, history) // BLOCK_N


@triton.jit
def masked_queries(column_stop, history, walk, rules, BLOCK_N: tl.constexpr):
    """Behind how many blocks of `query_blocks` all see every key before `column_stop`; else all blocks."""
    if rules.window is not None or rules.contextual is not None:
        return walk.count
    else:
        # a query sees itself, so a block may begin at the last of the keys
        masked = tl.maximum((column_stop + BLOCK_N - 2) // BLOCK_N - walk.start, 0)
        return tl.where(column_stop <= history, tl.minimum(masked, walk.count), walk.count)


@triton.jit
def join(start, stop, start_2, stop_2, start_3, stop_3):
    """The walk of three runs of blocks, later ones cut to begin behind earlier ones."""
    # an empty run has length 0 and not a negative one, so the lengths add up
    stop = tl.maximum(stop, start)
    start_2 = tl.maximum(start_2, stop)
    stop_2 = tl.maximum(stop_2, start_2)
    start_3 = tl.maximum(start_3, stop_2)
    stop_3 = tl.maximum(stop_3, start_3)
    cut = stop - start
    cut_2 = cut + stop_2 - start_2
    #     blocks      start .. stop   start_2 .. stop_2   start_3 .. stop_3
    #     n           0 .. cut        cut .. cut_2        cut_2 .. count
    return Walk(cut_2 + stop_3 - start_3, start, cut, start_2 - stop, cut_2, start_3 - stop_2)


@triton.jit
def block_of(n, walk):
    """The n-th block of a walk."""
    return walk.start + n + tl.where(n >= walk.cut, walk.jump, 0) + tl.where(n >= walk.cut_2, walk.jump_2, 0)


@triton.jit
def key_blocks(row, row_stop, history, contexts, rules, BLOCK_N: tl.constexpr):
    """Blocks of BLOCK_N keys that queries [row, row_stop) may see."""
    high = tl.minimum(row_stop, history)
    if rules.contextual is not None:
        high = tl.where(row < contexts, history, high)
    low = 0
    head = 0
    if rules.window is not None:
        at = tl.minimum(row, history)
        # the first row's window begins first; one full row among the rows makes the walk begin at 0
        hides = at > rules.window + shift_of(contexts)
        hides = hides & ((rules.full == 0) | (tl.minimum(row_stop - 1, history) < history - rules.full))
        if rules.contextual is not None:
            hides = hides & (row >= contexts)
        low = tl.where(hides, at - rules.window, 0)
        # only the part of the prefix that the window hides is a run of its own
        head = tl.minimum(rules.prefix, low)
    own = tl.maximum(row, history)
    if rules.group is not None:
        own = history + (own - history) // rules.group * rules.group
    tail = tl.where(row_stop > history, (row_stop + BLOCK_N - 1) // BLOCK_N, 0)
    return join(
        0,
        (head + BLOCK_N - 1) // BLOCK_N,
        low // BLOCK_N,
        (high + BLOCK_N - 1) // BLOCK_N,
        own // BLOCK_N,
        tail,
    )


@triton.jit
def query_blocks(column, column_stop, length, history, contexts, hidden, rules, BLOCK_N: tl.constexpr):
    """Blocks of BLOCK_N queries, none before place `hidden`, that may see keys [column, column_stop)."""
    least = hidden // BLOCK_N
    # contextual queries see the whole history, later keys too
    # Three runs of queries: contextual tokens, which see keys behind them; rows from the keys themselves to
    # the end of their windows; full rows and targets at the end of the sequence.
    early = 0
    if rules.contextual is not None:
        early = tl.where(column < history, contexts, 0)
    reach = history
    late = history
    late_stop = length
    if rules.window is not None:
        free = column < rules.prefix
        shift = shift_of(contexts)
        # windows hide nothing from the rows up to window + shift, whatever the key
        by_window = tl.maximum(column_stop, shift + 1) + rules.window
        reach = tl.where(free, history, tl.minimum(history, by_window))
        # full rows and targets come last and are a run of their own, unless no key here is near them
        late = history - rules.full
        near = free | (rules.full > 0) | (column_stop > history - rules.window)
        near = near | (history - shift <= rules.window)
        late_stop = tl.where(near, length, 0)
    group_stop = column_stop
    if rules.group is not None:
        group_stop = history + (column_stop - history + rules.group - 1) // rules.group * rules.group
    reach = tl.where(column_stop > history, tl.minimum(length, group_stop), reach)
    late_stop = tl.where(column < history, late_stop, 0)
    nearest = tl.maximum(column // BLOCK_N, least)
    return join(
        tl.where(early > 0, least, nearest), (early + BLOCK_N - 1) // BLOCK_N,
        nearest, (reach + BLOCK_N - 1) // BLOCK_N,
        tl.maximum(late // BLOCK_N, least), (late_stop + BLOCK_N - 1) // BLOCK_N,
    )  # fmt: skip
