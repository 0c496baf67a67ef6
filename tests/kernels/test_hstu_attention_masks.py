"""One mask: the formula, the CPU's spans and Triton's blocks agree on who sees whom, option by option."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from impls import GPU
from speeds import examples

from tritonrec.kernels.hstu_attention.call import HSTUMask
from tritonrec.kernels.hstu_attention.masks import visible
from tritonrec.kernels.hstu_attention.numba_mask import find_runs, find_spans
from tritonrec.kernels.hstu_attention.triton_mask import (
    Rules,
    block_of,
    clear_keys,
    key_blocks,
    masked_queries,
    query_blocks,
)
from tritonrec.kernels.hstu_attention.triton_mask import visible as visible_block


def Mask(group=1, max_attn_len=0, min_full_attn_seq_len=0, attn_prefix_len=0):
    return HSTUMask(None, group, None, 0, max_attn_len, min_full_attn_seq_len, attn_prefix_len)


def numbers_of(mask):
    return (
        mask.target_group_size, mask.max_attn_len, mask.min_full_attn_seq_len, mask.attn_prefix_len
    )  # fmt: skip


TRITON = pytest.mark.gpu if GPU else pytest.mark.interpreter
DEVICE = "cuda" if GPU else "cpu"


@st.composite
def sequences(draw, longest=70):
    """(length, targets, contexts, mask, queries)."""
    length = draw(st.integers(0, longest))
    targets = draw(st.integers(0, length))
    contexts = draw(st.integers(0, min(length - targets, 9)))
    some = st.one_of(st.integers(0, 5), st.integers(0, longest + 2))
    mask = Mask(draw(st.integers(1, 9)), draw(some), draw(some), draw(some))
    return length, targets, contexts, mask, draw(st.integers(0, length))


def sees(i, j, length, targets, contexts, mask):
    """The mask in words, pair by pair."""
    history = length - targets
    if i == j:
        return True
    if i < contexts:  # contextual tokens see each other and history
        return j < history
    if j >= history:  # targets are seen by later ones of their group
        return i > j and (i - history) // mask.target_group_size == (j - history) // mask.target_group_size
    if j > i:
        return False
    first = max(contexts - 1, 0)  # contextual tokens share one place in front of history
    at, key = min(i, history), max(j, first)
    if mask.max_attn_len == 0 or at - key <= mask.max_attn_len or j < mask.attn_prefix_len:
        return True
    return mask.min_full_attn_seq_len > 0 and at >= history - mask.min_full_attn_seq_len


def drawn(*arguments):
    return ["".join("1" if seen else "." for seen in row) for row in visible(*arguments).tolist()]


def test_masks_are_drawn():
    assert drawn(5, 2, 0, Mask()) == ["1....", "11...", "111..", "1111.", "111.1"]
    assert drawn(5, 3, 0, Mask(2)) == ["1....", "11...", "111..", "1111.", "11..1"]
    assert drawn(5, 1, 2, Mask()) == ["1111.", "1111.", "111..", "1111.", "11111"]
    assert drawn(5, 0, 1, Mask()) == ["11111", "11...", "111..", "1111.", "11111"]
    assert drawn(6, 1, 0, Mask(max_attn_len=2)) == [
        "1.....",
        "11....",
        "111...",
        ".111..",
        "..111.",
        "...111",
    ]
    assert drawn(5, 0, 0, Mask(1, 1, 0, 1)) == ["1....", "11...", "111..", "1.11.", "1..11"]
    assert drawn(5, 1, 0, Mask(1, 1, 1)) == ["1....", "11...", ".11..", "1111.", "11111"]
    assert drawn(8, 2, 2, Mask(max_attn_len=2)) == [
        "111111..", "111111..", "111.....", "1111....", "..111...", "...111..", "....111.", "....11.1",
    ]  # fmt: skip


@given(sequences(24))
def test_the_formula_says_what_the_words_say(sequence):
    length, targets, contexts, mask, _ = sequence
    rule = [[sees(i, j, length, targets, contexts, mask) for j in range(length)] for i in range(length)]
    assert visible(length, targets, contexts, mask).tolist() == rule


@given(sequences(200))
def test_spans_are_the_mask_and_runs_cover_them(sequence):
    length, targets, contexts, mask, queries = sequence
    hidden = length - queries
    spans = np.zeros((length, 4), np.int64)
    find_spans(spans, hidden, length, length - targets, contexts, np.array(numbers_of(mask)))
    seen = np.zeros((length, length), bool)
    for i in range(hidden, length):
        prefix, low, high, own = spans[i]
        seen[i, :prefix] = seen[i, low:high] = seen[i, own : i + 1] = True
        assert prefix <= low <= high and (own > i or own >= high)
    assert (seen[hidden:] == visible(length, targets, contexts, mask)[hidden:].numpy()).all()
    runs = np.zeros((3, 2), np.int64)
    for first in range(hidden, length, 4):
        stop = min(first + 4, length)
        covered, last = np.zeros(length, bool), 0
        for start, end in runs[: find_runs(runs, spans, first, stop)]:
            assert last <= start < end and start % 64 == 0
            covered[start:end], last = True, end
        assert not (seen[first:stop] & ~covered).any()


@triton.jit
def mark_kernel(
    seen_ptr, by_rows_ptr, by_columns_ptr, clear_ptr, length, history, contexts, hidden, rules,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark pairs seen, pairs walked by rows and by columns (once each), and pairs walked without a mask."""
    every_row = tl.arange(0, BLOCK)[:, None]
    every_column = tl.arange(0, BLOCK)[None, :]
    seen = visible_block(every_row, every_column, history, contexts, rules).to(tl.int32)
    everywhere = (every_row < length) & (every_column < length)
    tl.store(seen_ptr + every_row * length + every_column, seen, mask=everywhere)
    for first in range(hidden // BLOCK_M * BLOCK_M, length, BLOCK_M):
        least = tl.maximum(first, hidden)
        stop = tl.minimum(first + BLOCK_M, length)
        row = first + tl.arange(0, BLOCK_M)[:, None]
        walk = key_blocks(least, stop, history, contexts, rules, BLOCK_N)
        for n in range(0, walk.count):
            start = block_of(n, walk) * BLOCK_N
            column = start + tl.arange(0, BLOCK_N)[None, :]
            inside = (row >= least) & (row < stop) & (column < length)
            at = row * length + column
            tl.atomic_add(by_rows_ptr + at, 1, mask=inside)
            if n < clear_keys(least, history, rules, BLOCK_N):
                tl.atomic_add(clear_ptr + at, 1, mask=inside)
    for first in range(0, length, BLOCK_M):
        stop = tl.minimum(first + BLOCK_M, length)
        column = first + tl.arange(0, BLOCK_M)[None, :]
        walk = query_blocks(first, stop, length, history, contexts, hidden, rules, BLOCK_N)
        for n in range(0, walk.count):
            start = block_of(n, walk) * BLOCK_N
            row = start + tl.arange(0, BLOCK_N)[:, None]
            inside = (row < length) & (column < stop)
            at = row * length + column
            tl.atomic_add(by_columns_ptr + at, 1, mask=inside)
            if n >= masked_queries(stop, history, walk, rules, BLOCK_N):
                tl.atomic_add(clear_ptr + at, 1, mask=inside)


def marked(length, targets, contexts, mask, queries, own, step):
    """Four (length, length) int32: seen, walked by rows, walked by columns, without a mask."""
    marks = torch.zeros(4, length, length, dtype=torch.int32, device=DEVICE)
    group, window, full, prefix = numbers_of(mask)
    rules = Rules(None if group == 1 else group, window or None, full, prefix, 1 if contexts else None)
    mark_kernel[(1,)](
        *marks, length, length - targets, contexts, length - queries, rules, BLOCK_M=own, BLOCK_N=step,
        BLOCK=triton.next_power_of_2(max(length, 1)),
    )  # fmt: skip
    return marks.cpu()


@pytest.mark.slow
@TRITON
@settings(max_examples=examples(30))
@given(sequences(), st.sampled_from([(16, 8), (16, 16), (8, 8), (32, 8)]))
@example((16, 0, 0, Mask(1, 14), 16), (8, 8))  # the last row misses the first column of a causal block
@example((24, 0, 9, Mask(1, 8), 24), (8, 8))  # contextual tokens count as one place
def test_triton_walks_every_visible_pair_once(sequence, sizes):
    length, targets, contexts, mask, queries = sequence
    hidden = length - queries
    meant = visible(length, targets, contexts, mask)
    seen, by_rows, by_columns, clear = marked(*sequence, *sizes)
    assert torch.equal(seen > 0, meant)
    for walked in (by_rows, by_columns):
        assert int(walked.max() if length else 0) <= 1, "a block is walked twice"
        assert not (meant & (walked == 0))[hidden:].any(), "a visible pair is left out"
    assert not (~meant & (clear > 0))[hidden:].any(), "an invisible pair has no mask"


@TRITON
def test_blocks_that_nobody_sees_are_not_walked():
    """64 blocks of pairs; the window needs two a row, targets see history and themselves."""
    assert int(marked(64, 0, 0, Mask(max_attn_len=8), 64, 8, 8)[1].sum()) // 64 == 15
    assert int(marked(64, 0, 0, Mask(max_attn_len=8), 64, 8, 8)[2].sum()) // 64 == 15
    for walked in marked(64, 32, 0, Mask(), 64, 8, 8)[1:3]:
        assert int(walked.sum()) // 64 == (1 + 2 + 3 + 4) + 4 * (4 + 1)
    # below the diagonal, once by rows and once by columns
    assert int(marked(64, 0, 0, Mask(), 64, 8, 8)[3].sum()) // 64 == 2 * 28
