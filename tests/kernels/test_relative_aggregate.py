"""Relative aggregation: sums weighted by position or time, and a sequence keeps its bits in any batch."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from float_error import assert_error_at_most_twice
from impls import IMPLS, on
from speeds import slow_on_triton

from tritonrec.kernels.relative_aggregate.op import RELATIVE_AGGREGATE_BACKWARD, relative_aggregate

RESULTS = ("out", "dv", "dtable")
LEAST, MOST = -(2**63), 2**63 - 1

# name: lengths, heads, D, R, channel. Triton's blocks have 64 rows, walk 16 and own 16 entries of the table.
CASES = {
    "empty": ([], 2, 3, 4, "times"),
    "all_empty": ([0, 0, 0], 2, 3, 4, "positions"),
    "one_row": ([1], 1, 1, 1, "times"),
    "one_bucket": ([21], 2, 3, 1, "positions"),
    "skewed": ([33, 1, 0, 3, 2, 0, 1], 2, 8, 12, "times"),
    "step_minus_one": ([15, 3], 1, 4, 15, "positions"),
    "step_plus_one": ([17, 5], 1, 4, 17, "positions"),
    "block_plus_one": ([65, 33], 1, 8, 65, "positions"),
    "two_blocks_plus_one": ([129], 1, 4, 20, "positions"),
    "table_too_short": ([70, 9], 2, 5, 33, "positions"),
    "table_too_long": ([20, 9], 2, 5, 40, "positions"),
    "odd_dim": ([21, 6], 3, 13, 9, "times"),
    "every_power": ([66], 1, 3, 64, "powers"),
    "extreme_times": ([5, 4], 2, 3, 64, "extremes"),
    "non_contiguous": ([5, 18], 2, 3, 6, "times"),
}
LONG = {"block_plus_one", "two_blocks_plus_one", "table_too_long", "every_power"}  # slow under Triton


def timestamps_of(channel, tokens, generator):
    if channel == "positions":
        return None
    if channel == "powers":  # differences to the first: 0, then each power of two and one less, to the end
        return torch.tensor([LEAST, *(LEAST + 2**k - (k % 3 == 0) for k in range(64)), MOST])
    if channel == "extremes":
        return torch.tensor([LEAST, MOST, 0, -1, MOST, MOST, LEAST, MOST - 1, LEAST + 1])
    gaps = torch.randint(-2, 5, (tokens,), generator=generator) ** 5  # a few steps back in time
    return gaps.cumsum(0) - 500


@lru_cache
def case(name):
    """do, v, table, then seq_offsets, max_seq_len, timestamps."""
    lengths, heads, dim, buckets, channel = CASES[name]
    generator = torch.Generator().manual_seed(7)
    both = torch.randn(sum(lengths), 2 * heads * dim, generator=generator) * 1.5 + 0.2
    do, v = (part.unflatten(1, (heads, dim)) for part in both.chunk(2, 1))
    if name != "non_contiguous":
        do, v = do.contiguous(), v.contiguous()
    table = torch.randn(heads, buckets, generator=generator) + 0.3
    times = timestamps_of(channel, sum(lengths), generator)
    return (do, v, table), (torch.tensor([0, *np.cumsum(lengths)]), max(lengths, default=0), times)


def bucket(i, j, times, count):
    if times is None:
        return min(i - j, count - 1)
    gap, floor = times[i] - times[j], 0
    while gap >= 2 ** (floor + 1):
        floor += 1
    return min(floor, count - 1)


def plain(tensors, rest):
    """out, dv and each sequence's dtable by dense matrices, in the dtype of the tensors."""
    (do, v, table), (offsets, _, times) = tensors, rest
    out, dv = torch.zeros_like(v), torch.zeros_like(v)
    dtable = torch.zeros(len(offsets) - 1, *table.shape, dtype=table.dtype)
    times = None if times is None else times.tolist()
    for b, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        of_pair = torch.zeros(stop - start, stop - start, dtype=torch.int64)
        for i in range(start, stop):
            for j in range(start, i + 1):
                of_pair[i - start, j - start] = bucket(i, j, times, table.shape[1])
        a, c = (tensor[start:stop].transpose(0, 1) for tensor in (do, v))
        weights = table[:, of_pair].tril()
        out[start:stop], dv[start:stop] = (weights @ c).transpose(0, 1), (weights.mT @ a).transpose(0, 1)
        one_hot = torch.nn.functional.one_hot(of_pair, table.shape[1]).to(table.dtype)
        dtable[b] = torch.einsum("hij,ijr->hr", (a @ c.mT).tril(), one_hot)
    return out, dv, dtable


def exact(tensors, rest):
    """The same in float64."""
    return plain([tensor.double() for tensor in tensors], rest)


def run(impl, tensors, rest):
    """out, dv and each sequence's dtable."""
    do, v, table = (on(impl, tensor.detach()) for tensor in tensors)
    offsets, longest, times = on(impl, rest[0]), rest[1], on(impl, rest[2])
    out = relative_aggregate(v, table, offsets, longest, times, impl=impl)
    return [
        t.cpu() for t in (out, *RELATIVE_AGGREGATE_BACKWARD(do, v, table, offsets, longest, times, impl=impl))
    ]


@lru_cache
def expected_of(name):
    return plain(*case(name)), exact(*case(name))


@pytest.mark.parametrize(("impl", "name"), slow_on_triton(IMPLS, CASES, CASES.keys() - LONG))
def test_error_is_that_of_plain_float32(impl, name):
    for what, *values in zip(RESULTS, run(impl, *case(name)), *expected_of(name), strict=True):
        assert_error_at_most_twice(*values, what)


@pytest.mark.smoke
@pytest.mark.parametrize("impl", IMPLS)
def test_buckets_are_written_out(impl):
    """With v = 1 and weights 2**-r, a token's sum shows how many tokens lie in each bucket."""
    times = torch.tensor([0, 3, 3, 40, -9])
    table, v = 2.0 ** -torch.arange(8.0)[None], torch.ones(5, 1, 1)
    offsets = torch.tensor([0, 4, 5])
    got = run(impl, (v, v, table), (offsets, 4, times))
    assert got[0].flatten().tolist() == [1, 1.5, 2.5, 1 + 3 / 32, 1]
    assert got[2].tolist() == [[[4 + 1, 2, 0, 0, 0, 3, 0, 0]], [[1, 0, 0, 0, 0, 0, 0, 0]]]
    got = run(impl, (v, v, table), (offsets, 4, None))
    assert got[0].flatten().tolist() == [1, 1.5, 1.75, 1.875, 1]
    assert got[2].tolist() == [[[4, 3, 2, 1, 0, 0, 0, 0]], [[1, 0, 0, 0, 0, 0, 0, 0]]]
    got = run(impl, (v, v, table[:, :2]), (offsets, 4, None))
    assert got[0].flatten().tolist() == [1, 1.5, 2, 2.5, 1] and got[2][0].tolist() == [[4, 6]]


def test_more_buckets_than_an_index_reaches_are_refused():
    v, table = torch.empty(0, 1, 2, device="meta"), torch.empty(1, 2**27 + 1, device="meta")
    offsets = torch.zeros(2, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"at most 2\*\*27 buckets a head, got 134217729"):
        relative_aggregate(v, table, offsets, 3)
