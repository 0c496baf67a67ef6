"""A padded call gives what the plain one gives of the entries that hold, and fills the rest as promised."""

import pytest
import torch
from conformance.guarded_memory import guarded_memory
from impls import GPU, IMPLS, TRITON, on

from tritonrec import ops
from tritonrec.kernels.padding import report

SMALLEST, LARGEST = -(2**63), 2**63 - 1
POISON = 77  # a key and a row number that padding must not bring in


@pytest.fixture(autouse=True)
def guarded():
    """Every element of a result is written, the padding too."""
    with guarded_memory():
        yield


def scalar(impl, value):
    return on(impl, torch.tensor(value))


def behind(part, length, fill):
    """The first `length` entries, where the others hold `fill`."""
    part = part.cpu()
    assert (part[length:] == fill).all()
    return part[:length]


def keys_of(name):
    generator = torch.Generator().manual_seed(5)
    return {
        "empty": torch.zeros(0, dtype=torch.int64),
        "one": torch.tensor([SMALLEST]),
        "all_equal": torch.full((300,), -7),
        "none_equal": torch.arange(-128, 129) * (2**54 + 1),
        "extremes": torch.tensor([LARGEST, SMALLEST, 0, -1, LARGEST, SMALLEST, 1, 0]),
        "skewed": torch.randint(-40, 40, (520,), generator=generator),
    }[name]


def counts_of(size):
    """Ends, a block and its neighbours, and counts that are out of range and taken as an end."""
    around = [n + d for n in (256, 512) for d in (-1, 0, 1) if n + d < size]
    return sorted({0, 1, size // 2, size, *around} | {-(2**40), 2**40})


NAMES = ["empty", "one", "all_equal", "none_equal", "extremes", "skewed"]


def check_unique(keys, count, impl):
    size = len(keys)
    length = min(max(count, 0), size)
    distinct, inverse, times = ops.unique(keys[:length], impl="reference")
    got = ops.unique(on(impl, keys), impl=impl, padded=True, count=scalar(impl, count))
    assert int(got[3]) == len(distinct) and got[3].dtype == torch.int64 and got[3].dim() == 0
    assert torch.equal(behind(got[0], len(distinct), 0), distinct) and len(got[0]) == size
    assert torch.equal(behind(got[1], length, -1), inverse) and len(got[1]) == size
    assert torch.equal(behind(got[2], len(distinct), 0), times) and len(got[2]) == size
    short = ops.unique(on(impl, keys), impl=impl, count=scalar(impl, count))
    assert torch.equal(short[0].cpu(), distinct) and torch.equal(short[2].cpu(), times)
    assert torch.equal(behind(short[1], length, -1), inverse)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("impl", ["reference", "cpu", TRITON])
def test_unique(impl, name):
    keys = keys_of(name)
    for count in counts_of(len(keys)):
        check_unique(keys, count, impl)
    for ours, plain in zip(
        ops.unique(on(impl, keys), impl=impl, padded=True), ops.unique(keys, impl="reference"), strict=False
    ):
        assert torch.equal(ours.cpu()[: len(plain)], plain)


def check_intersect(left, right, left_count, right_count, impl):
    a, b = min(max(left_count, 0), len(left)), min(max(right_count, 0), len(right))
    expected = ops.intersect(left[:a], right[:b], impl="reference")
    counts = {"left_count": scalar(impl, left_count), "right_count": scalar(impl, right_count)}
    here, there, common = ops.intersect(on(impl, left), on(impl, right), impl=impl, padded=True, **counts)
    assert int(common) == len(expected[0])
    for ours, plain in ((here, expected[0]), (there, expected[1])):
        assert len(ours) == min(len(left), len(right))
        assert torch.equal(behind(ours, len(plain), -1), plain)
    for ours, plain in zip(
        ops.intersect(on(impl, left), on(impl, right), impl=impl, **counts), expected, strict=True
    ):
        assert torch.equal(ours.cpu(), plain)


@pytest.mark.parametrize("impl", IMPLS)
def test_intersect(impl):
    extremes, many = keys_of("extremes")[:4], keys_of("none_equal")
    shifted = many.flip(0)[3:]
    for left, right in (
        (extremes, many),
        (many, extremes),
        (many, shifted),
        (shifted, many),
        (many, many[:0]),
    ):
        for left_count in (0, len(left) - 1, 2**40):
            for right_count in {-1, len(right) // 2, len(right)}:
                check_intersect(left, right, left_count, right_count, impl)


@pytest.mark.interpreter
@pytest.mark.skipif(GPU, reason="writes out of bounds are seen by guards on the host")
def test_more_matches_than_room_write_nothing_outside():
    """Keys that are not distinct are against the contract; memory stays whole all the same."""
    left = torch.zeros(300, dtype=torch.int64)
    here, there, common = ops.intersect(left, left[:1], impl="triton", padded=True)
    assert here.tolist() == [0] and there.tolist() == [0] and int(common) == 1


def table(impl, slots, occupied=()):
    keys = on(impl, torch.zeros(slots, dtype=torch.int64))
    rows = on(impl, torch.full((slots,), -1, dtype=torch.int32))
    ops.hash_insert(keys, rows, on(impl, torch.tensor(occupied, dtype=torch.int64)), 0, impl=impl)
    return keys, rows


def dict_of(slot_keys, slot_rows):
    return {k: r for k, r in zip(slot_keys.tolist(), slot_rows.tolist(), strict=True) if r >= 0}


@pytest.mark.parametrize("free", [0, 2, 5])
@pytest.mark.parametrize("count", [-3, 0, 1, 4, 6, 99])
@pytest.mark.parametrize("impl", IMPLS)
def test_insert_takes_rows_for_the_keys_that_hold(impl, count, free):
    keys = torch.tensor([-1, SMALLEST, POISON, LARGEST, 0, 5])
    length = min(max(count, 0), 6)
    free_rows = torch.arange(50, 50 + free)
    ours, plain = table(impl, 16, [0, POISON]), table("reference", 16, [0, POISON])
    expected, new = ops.hash_insert(*plain, keys[:length], 2, free_rows, impl="reference")
    next_row, status = scalar(impl, 2), scalar(impl, 0)
    rows, inserted = ops.hash_insert(
        *ours,
        on(impl, keys),
        next_row,
        on(impl, free_rows),
        impl=impl,
        count=scalar(impl, count),
        status=status,
    )
    assert torch.equal(behind(rows, length, -1), expected) and torch.equal(
        behind(inserted, length, False), new
    )
    assert dict_of(*ours) == dict_of(*plain)
    assert int(next_row) == 2 + max(int(new.sum()) - free, 0) and int(status) == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_a_refused_insert_says_so_in_the_status_and_keeps_the_first_code(impl):
    ours = table(impl, 8, [1, 2, 3])
    before, next_row, status = dict_of(*ours), scalar(impl, 3), scalar(impl, 0)
    keys = on(impl, torch.tensor([2, 10, 11, 12, 13, 14, 15, 1]))
    rows, inserted = ops.hash_insert(*ours, keys, next_row, impl=impl, status=status)
    assert rows.tolist() == [1, -1, -1, -1, -1, -1, -1, 0] and not inserted.any()
    assert dict_of(*ours) == before and int(next_row) == 3 and int(status) == 6
    with pytest.raises(ops.HashTableFullError, match="6 new keys did not fit into a table of 8 slots"):
        ops.check_inserted(status, ours[1])
    ops.hash_insert(*ours, keys[:7] + 20, next_row, impl=impl, status=status)
    assert int(status) == 6
    fits, _ = ops.hash_insert(*ours, keys[:6], next_row, impl=impl, status=status)
    assert fits.tolist() == [1, 3, 4, 5, 6, 7] and int(status) == 6 and int(next_row) == 8
    ops.check_inserted(status.zero_(), ours[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_that_pass_the_last_one_are_refused_on_the_device_too(impl):
    ours, next_row, status = table(impl, 8), scalar(impl, 2**31 - 2), scalar(impl, 0)
    keys, free = on(impl, torch.tensor([4, 5, 6, 7])), on(impl, torch.tensor([9]))
    rows, _ = ops.hash_insert(*ours, keys, next_row, free, impl=impl, status=status)
    assert rows.tolist() == [-1] * 4 and int(status) == 4 and dict_of(*ours) == {}
    with pytest.raises(ops.HashTableFullError, match="or passed the last int32 row"):
        ops.check_inserted(status, ours[1])
    with pytest.raises(ValueError, match="3 new keys from row 2147483646 pass the last int32 row"):
        ops.hash_insert(*ours, keys, next_row, free, impl=impl)
    rows, _ = ops.hash_insert(*ours, keys[:3], next_row, free, impl=impl, status=status)
    assert rows.tolist() == [9, 2**31 - 2, 2**31 - 1] and int(next_row) == 2**31


@pytest.mark.parametrize("impl", IMPLS)
def test_a_value_without_a_number_is_put_into_the_status(impl):
    values = torch.ones(5, 4)
    values[3, 2], values[4, 1] = float("nan"), float("inf")
    status, segments = scalar(impl, 0), on(impl, torch.tensor([0, 1, 0, 1, 1]))
    ops.segment_sum(
        on(impl, values), segments, 2, consistency="batch", impl=impl, status=status, count=scalar(impl, 3)
    )
    assert int(status) == 0  # the NaN lies behind the count
    ops.check_summed(status, values.shape)
    ops.segment_sum(on(impl, values), segments, 2, consistency="batch", impl=impl, status=status)
    assert int(status) == 1 + 3 * 4 + 2
    ops.to_fixed_point(on(impl, values), impl=impl, status=status)
    assert int(status) == 15  # the first code stays
    with pytest.raises(ops.ExactSumError, match=r"rows\[3, 2\] or a sum .* in units of 2\*\*-20") as caught:
        ops.check_summed(status, values.shape, fraction_bits=20, name="rows")
    assert caught.value.index == (3, 2) and caught.value.value is None
    ops.to_fixed_point(on(impl, values), impl=impl, status=status.zero_())
    assert int(status) == 15
    full = on(impl, torch.full((2, 4), 2**63 - 1))
    ops.segment_sum(
        on(impl, values[:2]), segments[:2], 2, consistency="batch", out=full, impl=impl, status=status.zero_()
    )
    assert int(status) == 1


def test_a_status_keeps_the_first_code():
    status = torch.tensor(0)
    for code in (0, 5, 7):
        report(torch.tensor(code), status, KeyError)
        assert int(status) == min(code, 5)
    status = torch.tensor(0)
    for code in (0, 5, 7):
        report(code, status, KeyError)
        assert int(status) == min(code, 5)
    with pytest.raises(KeyError, match="5"):
        report(torch.tensor(5), None, KeyError)
