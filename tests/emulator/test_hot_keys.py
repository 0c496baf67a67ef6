"""Promise: no program of an exact sum walks more rows than a part has, whatever the keys.

`test_plugin.py` runs this file with ``--emulate``. Instructions are those of the program that has most.
"""

import pytest
import torch

from tritonrec import ops
from tritonrec.harness.emulator.driver import current
from tritonrec.kernels import dispatch
from tritonrec.kernels.rows import triton_segment_sum
from tritonrec.kernels.rows.op import ProductTerms

pytestmark = pytest.mark.skipif(dispatch.emulated is None, reason="needs pytest --emulate")
DIM, BITS = 5, ops.FRACTION_BITS
PART = triton_segment_sum.PART
KEYS = {
    "one key": lambda rows: torch.full((rows,), 1),
    "half one key": lambda rows: torch.arange(rows) % 2 * (torch.arange(rows) % 5),
    "two keys": lambda rows: (torch.arange(rows) * 7 // 5) % 2,
    "spread": lambda rows: torch.arange(rows) % 5,
}


def most(call):
    """The result of a call, and the most instructions that any program had."""
    session = current()
    session.keep_history, session.history = True, []
    try:
        result = call()
        return result, max(counts.most for _, counts in session.history)
    finally:
        session.keep_history = False


def values(rows):
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(rows))


def terms(rows):
    """As they are rounded."""
    return (values(rows).double() * 2.0**BITS).round().long()


def summed(rows, segments, count=6):
    return torch.zeros(count, DIM, dtype=torch.int64).index_add_(0, segments, terms(rows))


def segment_sum(rows, segments):
    return ops.segment_sum(values(rows), segments, 6, consistency="batch", impl="triton")


def add_packed_rows(rows, segments):
    packed = ops.pack_rows(terms(rows), torch.arange(rows), impl="cpu")
    return ops.add_packed_rows(torch.zeros(6, DIM, dtype=torch.int64), segments, *packed, impl="triton")


def add_products(rows, segments):
    """Two terms for each of half as many rows, whose factors are powers of two."""
    factors = torch.ones(rows // 2, 2)
    sums = torch.zeros(6, DIM, dtype=torch.int64)
    half = values(rows)[: rows // 2]
    ProductTerms(half, factors, segments[: rows // 2 * 2], 6, "triton").add_to(sums, BITS, "rows")
    return sums


def only_segment(rows, _segments):
    zeros = torch.zeros(rows, dtype=torch.int64)
    return ops.segment_sum(values(rows), zeros, 1, consistency="batch", impl="triton")


@pytest.fixture(params=["atomics", "no atomics"])
def device(request, monkeypatch):
    """One that adds int64 atomically, and one that does not."""
    if request.param == "no atomics":
        monkeypatch.setattr(dispatch, "has_int64_atomics", lambda tensor: False)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("call", [segment_sum, add_packed_rows, add_products])
def test_no_program_walks_more_than_a_part(call, name, device):
    """A program's instructions for many rows, beside one that walks a part, and a tenth more."""
    _, of_part = most(lambda: call(PART, torch.full((PART,), 1)))
    rows = 12 * PART + 5
    segments = KEYS[name](rows)
    sums, of_many = most(lambda: call(rows, segments))
    assert of_many <= 1.1 * of_part, (of_many, of_part)
    if call is not add_products:
        assert torch.equal(sums, summed(rows, segments))


def test_neither_does_one_of_the_only_segment(device):
    _, of_part = most(lambda: only_segment(PART, None))
    rows = 12 * PART + 5
    sums, of_many = most(lambda: only_segment(rows, None))
    assert of_many <= 1.1 * of_part
    assert torch.equal(sums, summed(rows, torch.zeros(rows, dtype=torch.int64), 1))


def test_a_float_sum_is_walked_by_one_program():
    """Its order of additions is part of the bits: twice the rows are twice the instructions."""

    def call(rows):
        return ops.segment_sum(values(rows), torch.full((rows,), 1), 6, impl="triton")

    (_, of_one), (_, of_two) = most(lambda: call(1000)), most(lambda: call(2000))
    assert 1.8 < of_two / of_one < 2.2


@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_gradient_of_many_tokens_is_shared(bias):
    """Eight times the tokens, and no program has twice the instructions; the sums are the CPU's."""

    def call(samples, impl):
        generator = torch.Generator().manual_seed(samples)
        # multiples of 1/8: products and their sums are exact in float32, in any order
        dy, x = (torch.randint(-15, 16, (samples * 256, size), generator=generator) / 8 for size in (40, 36))
        sums = torch.zeros(40, 36, dtype=torch.int64), torch.zeros(40, dtype=torch.int64)
        options = {"bias_accumulator": sums[1], "bias_name": "bias"} if bias else {}
        ops.linear_weight_grad(sums[0], dy, x, torch.arange(samples + 1) * 256, impl=impl, **options)
        return sums

    _, of_few = most(lambda: call(2, "triton"))
    sums, of_many = most(lambda: call(16, "triton"))
    assert of_many <= 1.2 * of_few, (of_many, of_few)
    assert all(map(torch.equal, sums, call(16, "cpu")))
