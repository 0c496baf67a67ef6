"""Relative aggregation: sums weighted by position or time, and a sequence keeps its bits in any batch."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from float_error import assert_error_at_most_twice
from hypothesis import given
from hypothesis import strategies as st
from impls import IMPLS, TRITON, on
from speeds import slow_on_triton

from tritonrec.kernels.head_layout import flat_heads
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


def exact(tensors, rest):
    """out, dv and each sequence's dtable in float64, pair by pair."""
    do, v, table = (tensor.double().numpy() for tensor in tensors)
    offsets, times = rest[0].tolist(), None if rest[2] is None else rest[2].tolist()
    out, dv = np.zeros_like(v), np.zeros_like(v)
    dtable = np.zeros((len(offsets) - 1, *table.shape))
    for b in range(len(offsets) - 1):
        for i in range(offsets[b], offsets[b + 1]):
            for j in range(offsets[b], i + 1):
                r = bucket(i, j, times, table.shape[1])
                out[i] += table[:, r, None] * v[j]
                dv[j] += table[:, r, None] * do[i]
                dtable[b, :, r] += (do[i] * v[j]).sum(1)
    return [torch.from_numpy(array) for array in (out, dv, dtable)]


def plain(tensors, rest):
    """The same in float32 by dense matrices."""
    (do, v, table), (offsets, _, times) = tensors, rest
    out, dv = torch.zeros_like(v), torch.zeros_like(v)
    dtable = torch.zeros(len(offsets) - 1, *table.shape)
    times = None if times is None else times.tolist()
    for b, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        of_pair = torch.zeros(stop - start, stop - start, dtype=torch.int64)
        for i in range(start, stop):
            for j in range(start, i + 1):
                of_pair[i - start, j - start] = bucket(i, j, times, table.shape[1])
        a, c = (tensor[start:stop].transpose(0, 1) for tensor in (do, v))
        weights = table[:, of_pair].tril()
        out[start:stop], dv[start:stop] = (weights @ c).transpose(0, 1), (weights.mT @ a).transpose(0, 1)
        one_hot = torch.nn.functional.one_hot(of_pair, table.shape[1]).float()
        dtable[b] = torch.einsum("hij,ijr->hr", (a @ c.mT).tril(), one_hot)
    return out, dv, dtable


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


@pytest.mark.parametrize(
    ("impl", "channel"), slow_on_triton(["cpu", TRITON], ["positions", "times"], ["positions"])
)
def test_a_sequence_keeps_its_bits_in_any_batch(impl, channel, threads_one_and_two):
    lengths, heads, dim, buckets = [66, 1, 0, 17], 1, 8, 18
    if impl == "cpu":
        lengths, heads, dim, buckets = [301, 1, 0, 210, 66], 2, 64, 40
    generator = torch.Generator().manual_seed(3)
    pieces = [
        tensor.split(lengths)
        for tensor in torch.randn(2, sum(lengths), heads, dim, generator=generator).unbind()
    ]
    table = torch.randn(heads, buckets, generator=generator)
    times = timestamps_of(channel, sum(lengths), generator)

    def batch(order, room=0):
        chosen = [lengths[b] for b in order]
        do, v = (torch.cat([piece[b] for b in order]) for piece in pieces)
        clock = None if times is None else torch.cat([times.split(lengths)[b] for b in order])
        rest = (torch.tensor([0, *np.cumsum(chosen)]), max(chosen) + room, clock)
        out, dv, dtable = run(impl, (do, v, table), rest)
        return dict(zip(order, zip(out.split(chosen), dv.split(chosen), dtable, strict=True), strict=True))

    order = list(range(len(lengths)))

    def batches():
        return batch(order), batch(order[::-1], 100), *(batch([b]) for b in order)

    for result in threads_one_and_two(batches) if impl == "cpu" else [batches()]:
        whole, *others = result
        for other in others:
            for b, parts in other.items():
                for what, one, same in zip(RESULTS, whole[b], parts, strict=True):
                    assert torch.equal(one, same), f"{what} of sequence {b}"


@pytest.mark.parametrize("impl", IMPLS)
def test_nan_stays_in_its_sequence(impl):
    (do, v, table), rest = case("skewed")
    expected = run(impl, (do, v, table), rest)
    poisoned = [tensor.clone() for tensor in (do, v)]
    for tensor in poisoned:
        tensor[34:37] = float("nan")  # sequence 3
    out, dv, dtable = run(impl, (*poisoned, table), rest)
    for got, other in zip((out, dv), expected, strict=False):
        assert got[34:37].isnan().all()
        assert torch.equal(got[:34], other[:34]) and torch.equal(got[37:], other[37:])
    others = torch.arange(7) != 3
    assert dtable[3].isnan().any() and torch.equal(dtable[others], expected[2][others])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_token_sees_no_later_token(impl):
    (do, v, table), (offsets, longest, times) = case("odd_dim")
    before = run(impl, (do, v, table), (offsets, longest, times))
    late, early = v.clone(), do.clone()
    late[15:21] += 1
    early[:10] += 1
    after = run(impl, (early, late, table), (offsets, longest, times))
    assert torch.equal(before[0][:15], after[0][:15]) and (before[0][15:21] != after[0][15:21]).all()
    assert torch.equal(before[1][10:], after[1][10:]) and (before[1][:10] != after[1][:10]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_offsets": torch.tensor([1, 3, 5])}, r"seq_offsets\[0\] must be 0"),
        ({"seq_offsets": torch.tensor([0, 3, 4])}, "end at the 5 tokens"),
        ({"max_seq_len": -1}, "max_seq_len must"),
        ({"max_seq_len": 2}, "sequence 0 has 3 tokens, more than max_seq_len=2"),
    ],
)
@pytest.mark.parametrize("impl", IMPLS[:2])
def test_what_does_not_fit_is_refused(impl, change, message):
    fits = {
        "v": torch.ones(5, 2, 3), "table": torch.ones(2, 4), "seq_offsets": torch.tensor([0, 3, 5]),
        "max_seq_len": 3, "timestamps": torch.arange(5), "impl": impl,
    }  # fmt: skip
    relative_aggregate(**fits)
    with pytest.raises(ValueError, match=message):
        relative_aggregate(**{**fits, **change})


@given(
    st.lists(st.lists(st.integers(LEAST, MOST) | st.integers(-5, 5), max_size=9), min_size=1, max_size=4),
    st.integers(1, 3), st.integers(1, 19), st.integers(1, 66), st.booleans(), st.integers(0, 2**32 - 1),
    st.data(),
)  # fmt: skip
def test_a_batch_is_its_halves_end_to_end(sequences, heads, dim, buckets, by_time, seed, data):
    """Bit for bit, and as the reference says in float64."""
    lengths = [len(times) for times in sequences]
    times = torch.tensor([time for one in sequences for time in one], dtype=torch.int64) if by_time else None
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    generator = torch.Generator().manual_seed(seed)
    do, v = torch.randn(2, sum(lengths), heads, dim, generator=generator).unbind()
    table = torch.randn(heads, buckets, generator=generator)
    cut = data.draw(st.integers(0, len(lengths)))
    at = int(offsets[cut])
    early, late = (None, None) if times is None else (times[:at], times[at:])
    whole = run("cpu", (do, v, table), (offsets, 9, times))
    left = run("cpu", (do[:at], v[:at], table), (offsets[: cut + 1], 9, early))
    right = run("cpu", (do[at:], v[at:], table), (offsets[cut:] - at, 9, late))
    for what, *parts, value in zip(
        RESULTS, whole, left, right, exact((do, v, table), (offsets, 9, times)), strict=True
    ):
        assert torch.equal(parts[0], torch.cat(parts[1:])), what
        limit = 1e-5 * (1 + value.abs().amax()) if value.numel() else 0
        torch.testing.assert_close(parts[0].double(), value, rtol=0, atol=float(limit))


@pytest.mark.parametrize("cut", [None, "heads", "tokens", "dim", "every other"])
def test_a_flat_view_reaches_every_element_and_no_further(cut):
    whole = torch.randn(4, 3, 6)
    parts = {
        "heads": whole[:, 1:],
        "tokens": whole[::2],
        "dim": whole[..., :4],
        "every other": whole[..., ::2],
    }
    some = parts.get(cut, whole)
    flat, token_stride, head_stride = flat_heads(some)
    tokens, heads, dim = some.shape
    for token in range(tokens):
        for head in range(heads):
            start = int(token_stride) * token + int(head_stride) * head
            assert flat[start : start + dim].tolist() == some[token, head].tolist()
    assert start + dim == len(flat)


def test_more_buckets_than_an_index_reaches_are_refused():
    v, table = torch.empty(0, 1, 2, device="meta"), torch.empty(1, 2**27 + 1, device="meta")
    offsets = torch.zeros(2, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"at most 2\*\*27 buckets a head, got 134217729"):
        relative_aggregate(v, table, offsets, 3)
