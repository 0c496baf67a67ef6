"""Packed rows lose nothing: adding them is adding the rows, in the same bytes from every implementation."""

import numpy as np
import pytest
import torch
from conformance.guarded_memory import guarded_memory
from impls import IMPLS, TRITON, on

from tritonrec.kernels.fixed_point.errors import ExactSumError
from tritonrec.kernels.fixed_point.op import to_fixed_point
from tritonrec.kernels.packed_rows import op
from tritonrec.kernels.packed_rows.op import FLOAT, add_packed_rows, pack_rows, packed_bytes
from tritonrec.kernels.rows.op import segment_sum

LEAST, MOST = -(2**63), 2**63 - 1
EDGES = [
    0,
    1,
    -1,
    LEAST,
    MOST,
    *(sign * 2**b + d for b in range(7, 63, 8) for sign in (1, -1) for d in (0, -1)),
]


def mixed(count, dim, seed=0):
    """Rows of every width, and rows of floats of every magnitude, in a drawn order."""
    rng = np.random.default_rng(seed)
    values = rng.integers(LEAST, MOST, (count, dim), endpoint=True) >> rng.integers(0, 64, (count, 1))
    for row, kind in zip(values, rng.integers(0, 5, count), strict=True):
        if kind == 0:
            row[:] = rng.integers(-(2**24), 2**24, dim) << rng.integers(0, 40, dim)
        elif kind == 1:
            row[:] = rng.choice(EDGES, dim)
        elif kind == 2:
            row[:] = 0
    return torch.from_numpy(values)


# One row each: what it holds beside zeros, and the width that says.
WIDTHS = [
    ([0], 0),
    ([1], 1),
    ([-1], 1),
    ([127, -128], 1),
    ([128], 2),
    ([-129], 2),
    ([2**15 - 1, -(2**15)], 2),
    ([2**15], 3),
    ([-(2**23) - 1], 4),
    ([2**31 - 1, -(2**31)], 4),
    ([2**24 - 1], 4),  # a float32 too, but it needs no more as an integer
    ([2**31], FLOAT),
    ([2**31 + 1], 5),
    ([-(2**31) - 1], 5),
    ([-(2**31) - 2**8], FLOAT),
    ([2**39 - 1, -(2**39)], 5),
    ([2**39, 3], FLOAT),
    ([2**39 + 1], 6),
    ([-(2**47) - 1], 7),
    ([2**55 - 1], 7),
    ([2**55 + 1], 8),
    ([(2**24 - 1) << 38, 1], FLOAT),
    ([(2**24 - 1) << 38, 2**25 - 1], 8),
    ([(2**25 - 1) << 37], 8),
    ([-((2**24 - 1) << 8)], FLOAT),
    ([-((2**25 - 1) << 7)], 5),
    ([2**62], FLOAT),
    ([LEAST], FLOAT),
    ([LEAST + 1], 8),
    ([LEAST + 2**39], FLOAT),
    ([LEAST + 2**38], 8),
    ([MOST], 8),
    ([MOST - 2**39 + 1], FLOAT),
    ([MOST - 2**38 + 1], 8),
]


@pytest.mark.parametrize("dim", [2, 65, 130])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_width_is_the_smallest_that_holds_a_row(impl, dim):
    values = torch.zeros(len(WIDTHS), dim, dtype=torch.int64)
    for row, (elements, _) in enumerate(WIDTHS):
        place = (
            row * 7 + torch.arange(len(elements)) * (dim - 1)
        ) % dim  # the last block of columns counts too
        values[row, place] = torch.tensor(elements)
    widths, packed = pack_rows(on(impl, values), on(impl, torch.arange(len(WIDTHS))), impl=impl)
    assert widths.tolist() == [width for _, width in WIDTHS]
    assert len(packed) == dim * sum(width & 0x7F for _, width in WIDTHS)
    out = torch.zeros_like(on(impl, values))
    add_packed_rows(out, on(impl, torch.arange(len(WIDTHS))), widths, packed, impl=impl)
    assert torch.equal(out.cpu(), values)


@pytest.mark.smoke
@pytest.mark.parametrize("impl", IMPLS)
def test_the_bytes_are_those_of_the_page(impl):
    values = on(impl, torch.tensor([[3, -300], [0, 0], [2**40, -(2**62)]]))
    widths, packed = pack_rows(values, on(impl, torch.arange(3)), impl=impl)
    assert widths.tolist() == [2, 0, FLOAT] and widths.dtype == packed.dtype == torch.uint8
    assert bytes(packed.tolist()).hex() == "03d400fe" + "00000000808053de"


@pytest.mark.parametrize(
    ("count", "dim"), [(0, 3), (1, 1), (5, 0), (7, 3), (8, 64), (9, 65), (33, 130), (40, 1)]
)
@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_equals_the_reference(impl, count, dim):
    """In memory that nobody cleared, so that a byte nobody wrote shows."""
    values = mixed(12, dim, seed=count)
    rows = torch.from_numpy(np.random.default_rng(1).integers(0, 12, count))
    expected = pack_rows(values, rows, impl="reference")
    with guarded_memory():
        got = pack_rows(on(impl, values), on(impl, rows), impl=impl)
    assert torch.equal(got[0].cpu(), expected[0]) and torch.equal(got[1].cpu(), expected[1])
    assert got[1].is_contiguous() and got[1].device == on(impl, values).device
    segments = torch.randperm(count + 3, generator=torch.Generator().manual_seed(2))[:count]
    out = torch.full((count + 3, dim), -5)
    out[segments] = 0
    with guarded_memory():
        added = add_packed_rows(on(impl, out), on(impl, segments), *got, impl=impl).cpu()
    out[segments] = values[rows]
    assert torch.equal(added, out)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_of_one_occurrence_take_four_bytes(impl):
    gradients = torch.randn(6, 65, generator=torch.Generator().manual_seed(3)) * 30
    widths, packed = pack_rows(on(impl, to_fixed_point(gradients)), on(impl, torch.arange(6)), impl=impl)
    assert widths.tolist() == [FLOAT] * 6 and len(packed) == 4 * gradients.numel()


@pytest.mark.parametrize("impl", IMPLS)
def test_groups_travel_apart_and_arrive_joined(impl):
    """Two senders, three destinations: `packed_bytes` cuts, and parts are joined where they arrive."""
    counts = [[4, 0, 3], [1, 5, 2]]
    values = [mixed(10, 6, seed=seed) >> 2 for seed in (5, 6)]
    arrived = [([], []) for _ in range(3)]
    rows = [torch.randperm(10, generator=torch.Generator().manual_seed(7))[: sum(c)] for c in counts]
    for sender in range(2):
        widths, packed = pack_rows(on(impl, values[sender]), on(impl, rows[sender]), impl=impl)
        sizes = packed_bytes(widths, counts[sender], 6)
        assert len(sizes) == 3 and sum(sizes) == len(packed)
        for to, (some, parts) in enumerate(
            zip(widths.split(counts[sender]), packed.split(sizes), strict=True)
        ):
            arrived[to][0].append(some)
            arrived[to][1].append(parts)
    for to, (some, parts) in enumerate(arrived):
        sent = torch.cat([values[s][rows[s].split(counts[s])[to]] for s in range(2)])
        segments = torch.arange(len(sent)) % 3
        out = on(impl, torch.zeros(3, 6, dtype=torch.int64))
        add_packed_rows(out, on(impl, segments), torch.cat(some), torch.cat(parts), impl=impl)
        assert torch.equal(out.cpu(), segment_sum(sent, segments, 3, consistency="batch"))


@pytest.mark.parametrize("width", [9, 127, 128, 131, 133, 255])
@pytest.mark.parametrize("impl", IMPLS)
def test_corrupt_widths_and_bytes_are_named_before_anything_is_added(impl, width):
    values = torch.ones(4, 2, dtype=torch.int64)
    segments = on(impl, torch.arange(4))
    widths, packed = pack_rows(on(impl, values), segments, impl=impl)
    out = on(impl, torch.zeros(4, 2, dtype=torch.int64))
    for wrong in (packed[:-1], torch.cat([packed, packed[:1]]), packed[:0]):
        message = f"packed must have the 8 bytes of rows of these widths and dim 2, got {len(wrong)}"
        with pytest.raises(ValueError, match=message):
            add_packed_rows(out, segments, widths, wrong, impl=impl)
    widths[2:] = width
    message = rf"widths\[2\] = {width} must be 0 to 8 or 132"
    with pytest.raises(ValueError, match=message):
        add_packed_rows(out, segments, widths, packed, impl=impl)
    with pytest.raises(ValueError, match=message):
        packed_bytes(widths, [4], 2)
    assert not out.any()


def packed_floats(rows):
    """Rows of float32, as bytes that `pack_rows` gives for none that are no integers."""
    planes = [torch.tensor(row).view(torch.uint8).view(-1, 4).t().flatten() for row in rows]
    return torch.full((len(rows),), 0x84, dtype=torch.uint8), torch.cat(planes)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # of the interpreter
@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), 2.0**63, -(2.0**63) * 1.5, 3e38]
)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_float_that_is_no_int64_is_named(impl, value):
    """In bytes that another one has made, or a link."""
    widths, packed = (on(impl, each) for each in packed_floats([[2.0**40, -3.0], [5.0, value], [7.0, 8.0]]))
    out, segments = on(impl, torch.zeros(4, 2, dtype=torch.int64)), on(impl, torch.tensor([3, 1, 1]))
    with pytest.raises(ExactSumError, match=r"^sums\[1, 1\] = \S+ (is not finite|reaches 2\*\*26)") as caught:
        add_packed_rows(out, segments, widths, packed, name="sums", impl=impl)
    assert caught.value.index == (1, 1) and repr(caught.value.value) == repr(torch.tensor(value).item())


@pytest.mark.parametrize("impl", IMPLS)
def test_a_float_that_is_just_an_int64_is_added(impl):
    largest = float(2**63 - 2**39)
    widths, packed = (on(impl, each) for each in packed_floats([[-(2.0**63), largest], [0.0, -0.0]]))
    out = on(impl, torch.zeros(2, 2, dtype=torch.int64))
    add_packed_rows(out, on(impl, torch.tensor([1, 1])), widths, packed, impl=impl)
    assert out.tolist() == [[0, 0], [-(2**63), 2**63 - 2**39]]


OUT, TWO = torch.zeros(3, 4, dtype=torch.int64), torch.arange(2)
NONE = torch.zeros(2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: add_packed_rows(OUT, TWO, NONE, NONE), "packed must have the 0 bytes"),
        (lambda: packed_bytes(NONE, [1], 4), r"counts must cut the 2 rows .* got \[1\]"),
        (lambda: packed_bytes(NONE, [3, -1], 4), "counts must cut the 2 rows"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bytes_of_no_groups_and_of_empty_ones():
    widths = torch.tensor([0, 3, FLOAT, 8], dtype=torch.uint8)
    assert packed_bytes(widths, [0, 2, 0, 2], 5) == [0, 15, 0, 60]
    assert packed_bytes(widths[:0], [], 5) == [] and packed_bytes(widths[:0], [0, 0], 5) == [0, 0]
    assert packed_bytes(widths, [4], 0) == [0]


def test_bytes_of_rows_that_have_less_than_no_columns():
    with pytest.raises(ValueError, match="dim must not be negative, got -2"):
        packed_bytes(torch.tensor([3], dtype=torch.uint8), [1], -2)


def test_widths_on_a_device_are_checked_as_on_the_host(monkeypatch):
    good, bad = torch.tensor([0, 8, FLOAT], dtype=torch.uint8), torch.tensor([8, 9], dtype=torch.uint8)
    for there in (False, True):
        monkeypatch.setattr(op, "on_host", lambda tensor, there=there: not there)
        op.check_widths(good, 3, torch.zeros(3 * (8 + (FLOAT & 0x7F)), dtype=torch.uint8))
        with pytest.raises(ValueError, match=r"widths\[1\] = 9 must be 0 to 8"):
            op.check_widths(bad, 3)
        with pytest.raises(ValueError, match="packed must have the 24 bytes"):
            op.check_widths(bad[:1], 3, torch.zeros(23, dtype=torch.uint8))
