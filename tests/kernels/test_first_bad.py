"""Where several values are bad, the first one is reported, and by all implementations the same."""

import random

import pytest
import torch
from impls import TRITON, on

from tritonrec import ops

IMPLS = ["cpu", "reference", TRITON]
BITS = 36
EDGE = 2.0 ** (62 - BITS)  # the end of the grid
NAN, INF = float("nan"), float("inf")
VALUES = [0.5, -0.25, 1.0, EDGE / 2, -EDGE / 2, EDGE, -EDGE, NAN, INF]
SUMS = [0, 1, 2**62, -(2**62), 2**63 - 1, -(2**63)]


def term_of(value):
    """A value on the grid, None where it has no place."""
    if isinstance(value, int):
        return value
    return int(value * 2**BITS) if abs(value) < EDGE else None


def first_that_cannot_be_added(rows, segments, sums):
    """(row, column) of the first value without a place or whose sum leaves int64: occurrences in order."""
    for row, segment in enumerate(segments):
        for column, value in enumerate(rows[row]):
            term = term_of(value)
            if term is None or not -(2**63) <= sums[segment][column] + term < 2**63:
                return row, column
            sums[segment][column] += term
    return None


def draw(seed, pool):
    """Rows, their segments and the sums they are added to; most have more than one bad value."""
    rng = random.Random(seed)
    count, dim, segments = rng.randint(1, 6), rng.randint(1, 9), rng.randint(1, 3)
    rows = [
        [rng.choice([0.5, *pool] if pool is VALUES else [3, *pool]) for _ in range(dim)] for _ in range(count)
    ]
    owners = [rng.randrange(segments) for _ in range(count)]
    return rows, owners, [[rng.choice(SUMS) for _ in range(dim)] for _ in range(segments)]


def index_of(op, *arguments, **options):
    try:
        op(*arguments, **options)
    except ops.ExactSumError as error:
        return error.index
    return None


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["floats", "terms", "packed"])
def test_exact_sums(kind, impl):
    bad = 0
    for seed in range(60 if impl != "triton" else 9):
        rows, owners, sums = draw(seed, VALUES if kind == "floats" else SUMS)
        dtype = torch.float32 if kind == "floats" else torch.int64
        values, segments = on(impl, torch.tensor(rows, dtype=dtype)), on(impl, torch.tensor(owners))
        out, status = on(impl, torch.tensor(sums)), on(impl, torch.tensor(0))
        expected = first_that_cannot_be_added(rows, owners, [list(row) for row in sums])
        bad += expected is not None
        if kind == "packed":
            packed = ops.pack_rows(values, torch.arange(len(rows), device=values.device), impl=impl)
            assert index_of(ops.add_packed_rows, out, segments, *packed, impl=impl) == expected
            continue
        given, rest = (values, segments, len(sums)), {"consistency": "batch", "impl": impl}
        assert index_of(ops.segment_sum, *given, out=out.clone(), **rest) == expected
        ops.segment_sum(*given, out=out.clone(), status=status, **rest)
        assert int(status) == (0 if expected is None else 1 + expected[0] * values.shape[1] + expected[1])
    assert bad > 4


@pytest.mark.parametrize("impl", IMPLS)
def test_values_on_the_grid(impl):
    values = torch.ones(7, 300)
    for places in ([(6, 2)], [(3, 299), (3, 298)], [(5, 0), (2, 257), (4, 1)]):
        given = values.clone()
        for row, column in places:
            given[row, column] = NAN if column % 2 else -INF
        status = on(impl, torch.tensor(0))
        assert index_of(ops.to_fixed_point, on(impl, given), impl=impl) == min(places)
        ops.to_fixed_point(on(impl, given), impl=impl, status=status)
        assert int(status) == 1 + min(places)[0] * 300 + min(places)[1]


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_of_samples(impl):
    """By sample, then row, then column, where a value is too large and where a sum leaves int64."""
    offsets = torch.tensor([0, 2, 2, 3, 5])
    for places, full, expected in [
        ([(4, 1, 0)], [], (3, 1, 0)),
        ([(2, 5, 3), (2, 4, 6)], [], (2, 4, 3)),
        ([(3, 0, 0), (0, 6, 6)], [], (0, 6, 6)),
        ([(2, 5, 3)], [(5, 2)], (2, 5, 2)),  # a full sum before a value that is too large, in one row
        ([(2, 5, 3)], [(5, 4)], (2, 5, 3)),
    ]:
        dy, x = torch.zeros(5, 7), torch.zeros(5, 7)
        grid = torch.zeros(7, 7, dtype=torch.int64)
        for token, row, column in places:
            dy[token, row] = 1.0
            x[token, column] = EDGE
        for row, column in full:
            grid[row, column] = 2**63 - 1
            x[2, column] = 1.0
        tensors = (on(impl, tensor) for tensor in (grid, dy, x, offsets))
        assert index_of(ops.linear_weight_grad, *tensors, fraction_bits=BITS, impl=impl) == expected
