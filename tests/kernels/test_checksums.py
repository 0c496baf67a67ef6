"""Promise: a checksum changes with any single bit, and is the same on every device."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.kernels.checksums import (
    CHUNK,
    _weights,
    as_bytes,
    checksum,
    first_other_row,
    part_checksums,
    row_checksums,
    sums_of_bits,
    write_row_checksums,
)

pytestmark = pytest.mark.smoke
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def some_bytes(count, offset=0):
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count + offset,), generator=generator, dtype=torch.uint8)[offset:]


@given(st.integers(1, 9000), st.integers(0, 3), st.integers(0, 7), st.randoms())
def test_any_flipped_bit_changes_it(count, offset, bit, random):
    values = some_bytes(count, offset)
    before = checksum(values)
    assert torch.equal(checksum(values.clone()), before), "it goes by memory"
    values[random.randrange(count)] ^= 1 << bit
    assert checksum(values) != before


@pytest.mark.parametrize("count", [0, 1, 3, 4, 4 * CHUNK - 1, 4 * CHUNK, 4 * CHUNK + 1, 8 * CHUNK, 40_001])
def test_it_is_the_sum_of_its_definition(count):
    """As it is computed on a device: of rows of `CHUNK` words."""
    values, chunks = some_bytes(count, 1), count // (4 * CHUNK) + 1
    filled = torch.cat([values, values.new_zeros(4 * CHUNK * chunks - count)])
    words = filled.view(torch.int32).view(chunks, CHUNK).long()
    rows = (words * _weights(CHUNK, values.device)).sum(1)
    assert int(checksum(values)) == int((rows * _weights(chunks, values.device)).sum()) + count


def test_the_number_of_bytes_counts():
    zeros = torch.zeros(8, dtype=torch.uint8)
    assert len({int(checksum(zeros[:size])) for size in range(9)}) == 9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_shape_and_stride(dtype):
    values = (torch.arange(35, dtype=torch.int64) % 3).view(5, 7).to(dtype)
    assert torch.equal(checksum(values.t()), checksum(values.t().contiguous()))
    assert checksum(values.t()) != checksum(values)
    assert checksum(values[0, 0]) != checksum(values[0, :0])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (4, 1), (33, 17)])
def test_rows_have_the_sums_of_their_words(shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    expected = (values.view(torch.int32).long() * _weights(shape[1], values.device)).sum(1)
    assert torch.equal(row_checksums(values), expected)
    assert torch.equal(row_checksums(values.t().contiguous().t()), expected)


def test_rows_tell_minus_zero_and_nan_apart():
    values = torch.tensor([[0.0], [-0.0], [float("nan")], [-float("nan")]], dtype=torch.float32)
    assert len(row_checksums(values).unique()) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_parts_have_the_checksums_of_their_rows(dtype):
    values = some_bytes(7 * 12).view(dtype).view(7, -1)
    parts = values.split([3, 0, 2, 2])
    expected = [0 if number == 2 else int(checksum(part)) for number, part in enumerate(parts)]
    assert part_checksums(values, [3, 0, 2, 2], 2).tolist() == expected
    assert part_checksums(values[:0], [0, 0], 0).tolist() == [0, int(checksum(values[:0]))]


def test_a_row_is_compared_by_its_handle():
    rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    sums, nothing = torch.zeros(9, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    handles = torch.tensor([7, -1, 0, 3, 8])
    write_row_checksums(sums, handles, rows)
    assert sums[[7, 0, 3, 8]].tolist() == row_checksums(rows)[[0, 2, 3, 4]].tolist()
    assert sums[[1, 2, 4, 5, 6]].eq(0).all(), "a handle of -1 writes"
    assert first_other_row(sums, handles, rows, nothing) == -1
    rows.view(torch.int32)[1:4, 0] ^= 1
    assert first_other_row(sums, handles, rows, nothing) == 2
    assert first_other_row(sums, handles, rows, torch.tensor([2, -1])) == 3
    assert first_other_row(sums, handles, rows, torch.tensor([3, 2])) == -1
    assert first_other_row(sums, handles[:0], rows[:0], nothing) == -1


def test_sums_of_bits_are_those_of_torch_and_see_every_bit():
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(shape, generator=generator) for shape in ((3, 7), (1,), (0,), (33, 5))]
    tensors += [torch.randn(4, 6, generator=generator).t(), torch.tensor([float("nan"), -0.0, 3e38])]
    for parts in (tensors, tensors[:4], [torch.full((5000,), -(2**31), dtype=torch.int32)]):
        want = [int(each.contiguous().view(torch.int32).to(torch.int64).sum()) for each in parts]
        assert sums_of_bits(parts).tolist() == want
    before = sums_of_bits(tensors[:4])
    tensors[3].view(torch.int32)[32, 4] ^= 1
    assert (sums_of_bits(tensors[:4]) != before).tolist() == [False, False, False, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_a_slice_are_those_of_its_copy(dtype):
    """One element is contiguous whatever its stride, and torch refuses to view it as bytes."""
    values = some_bytes(240).view(5, -1)
    values = (values % 2).bool() if dtype == torch.bool else values.view(dtype)
    for part in (values, values[:, 1], values[2:3, 1], values[2:3, ::3], values[2, 1], values[:0, 1]):
        copied = part.clone(memory_format=torch.contiguous_format)
        found = as_bytes(part)
        assert found.dtype == torch.uint8 and len(found) == part.numel() * part.element_size()
        assert found.tolist() == list(copied.view(-1).view(torch.uint8))
        assert checksum(part) == checksum(copied)


@pytest.mark.parametrize("parts", [2, 17])
def test_sums_of_parts_are_those_of_each_part_in_order(parts):
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(shape, generator=generator) for shape in [(), (0,), (3,), (40, 8), (1000,)]]
    every = [each.view(-1).view(torch.int32) for each in tensors]
    want = []
    for each in every:
        bounds = [len(each) * i // parts for i in range(parts + 1)]
        want += [int(each[a:b].sum()) for a, b in pairwise(bounds)]
    assert sums_of_bits(tensors, parts).tolist() == want
    strided = [each.t() if each.dim() == 2 else each for each in tensors]  # not by the kernel
    assert len(sums_of_bits(strided, parts)) == len(want)
    assert sums_of_bits([*strided[:3], strided[4]], parts).tolist() == want[: 3 * parts] + want[4 * parts :]
    turned = tensors[3].flip(1).contiguous()
    assert sums_of_bits([turned]).tolist() == sums_of_bits([tensors[3]]).tolist()
    assert parts < 17 or sums_of_bits([turned], parts).tolist() != want[3 * parts : 4 * parts]
