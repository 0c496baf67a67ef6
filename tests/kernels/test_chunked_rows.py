"""Promise: a row of either form comes back with the bits it was written with, and `fits` knows which can."""

import numpy as np
import pytest
import torch

from tritonrec.kernels import chunked_rows
from tritonrec.kernels.chunked_rows import LOW, Chunks

EVERY_HALF = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
NEAR = [0.0, -0.0, 2.0**-14, 2.0**-15, 3 * 2.0**-24, 2.0**-25, 2.0**-14 - 2.0**-25, 65504.0, 65519.0, 65536.0]
NEAR += [1e30, 1e-30, 1e-45, float("inf"), -float("inf")]


def fits(values, dim):
    return chunked_rows.fits(values, dim).tolist()


def addresses(chunks):
    return np.array([chunk.data_ptr() for chunk in chunks], np.uint64)


def bits(values):
    return values.contiguous().view(torch.int32)


def float_patterns(zeroed):
    """Random bit patterns of float32, NaN left out, with that many low bits cleared."""
    patterns = torch.randint(-(2**31), 2**31, (50_000,)).to(torch.int32) & (-1 << zeroed)
    values = patterns.view(torch.float32)
    return values[~values.isnan()]


@pytest.mark.parametrize("zeroed", [0, 12, 13, 14, 16, 20])
def test_fits_says_what_torch_finds_by_rounding(zeroed):
    values = torch.cat([float_patterns(zeroed), torch.tensor(NEAR), -torch.tensor(NEAR)])
    for dim, form in ((1, torch.float16), (0, torch.bfloat16)):
        same = bits(values.to(form).to(torch.float32)) == bits(values)
        assert fits(values.view(-1, 1), dim) == same.tolist()


def test_one_value_that_does_not_fit_is_enough():
    values = torch.ones(5, 4)
    values[1, 0], values[2, 3], values[4, 2] = 1 + 2**-11, 1 + 2**-8, 1 + 2**-10
    assert fits(values, 3) == [True, False, False, True, True]


@pytest.mark.parametrize("chunk_rows", [1, 5, 1 << 16])
def test_every_float16_and_bfloat16_comes_back(chunk_rows):
    weights = EVERY_HALF.to(torch.float32)
    state = EVERY_HALF.view(torch.bfloat16).to(torch.float32).flip(0)
    values = torch.stack([weights, state], 1)[torch.randperm(1 << 16)]
    values = values[~values.isnan().any(1)]
    assert all(fits(values, 1))
    chunks = [
        torch.full((chunk_rows, 2), -1, dtype=torch.int16) for _ in range(-(-len(values) // chunk_rows))
    ]
    places = Chunks(addresses([]), addresses(chunks), 0, len(values), chunk_rows, 1, 2)
    locations = torch.randperm(len(values)) + LOW
    chunked_rows.write_rows(places, locations, values)
    assert torch.equal(bits(chunked_rows.read_rows(places, locations)), bits(values))


@pytest.mark.parametrize("width, dim", [(1, 1), (4, 3), (17, 17), (96, 32)])
def test_rows_of_both_forms_and_of_none(width, dim):
    chunk_rows, count = 3, 20
    chunks = [torch.randn(chunk_rows, width) for _ in range(7)]
    halves = [torch.zeros(chunk_rows, width, dtype=torch.int16) for _ in range(7)]
    places = Chunks(addresses(chunks), addresses(halves), 21, 21, chunk_rows, dim, width)
    numbers = torch.randperm(count)
    rows = torch.where(torch.arange(count) % 3 == 0, numbers + LOW, numbers)
    rows[torch.arange(count) % 7 == 0] = -1
    values = torch.randint(-8, 8, (count, width)).to(torch.float32)
    before = torch.cat(chunks)
    for _ in range(2):
        chunked_rows.write_rows(places, rows, values)
    here = rows >= 0
    assert torch.equal(chunked_rows.read_rows(places, rows)[here], values[here])
    untouched = torch.ones(7 * chunk_rows, dtype=torch.bool)
    untouched[rows[here & (rows < LOW)]] = False
    assert torch.equal(torch.cat(chunks)[untouched], before[untouched])


@pytest.mark.parametrize("locations", [[0, 10], [LOW - 1], [-1, LOW + 5], [2**62]])
def test_locations_beyond_the_chunks_are_named(locations):
    chunks, halves = torch.ones(12, 2), torch.ones(12, 2, dtype=torch.int16)
    places = Chunks(addresses([chunks]), addresses([halves]), 10, 5, 12, 1, 2)
    chunked_rows.read_rows(places, torch.tensor([-1, 0, 9, LOW, LOW + 4]))
    for call in (
        lambda: chunked_rows.read_rows(places, torch.tensor(locations)),
        lambda: chunked_rows.write_rows(places, torch.tensor(locations), torch.zeros(len(locations), 2)),
    ):
        with pytest.raises(IndexError, match=f"no row lies at location {locations[-1]}"):
            call()
    assert bool((chunks == 1).all()) and bool((halves == 1).all())
