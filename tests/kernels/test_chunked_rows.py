"""Promise: a row of either form comes back with the bits it was written with, and `fits` knows which can."""

import gc
import weakref

import pytest
import torch
from impls import GPU, IMPLS, TRITON
from no_sync import no_sync, on_device
from speeds import slow_except

from tritonrec.kernels import address_table, chunked_rows
from tritonrec.kernels.address_table import addresses
from tritonrec.kernels.chunked_rows import LOW, Chunks, op

DEVICE = torch.device("cuda" if GPU else "cpu")
FAST = ["cpu", TRITON]
EVERY_HALF = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
NEAR = [0.0, -0.0, 2.0**-14, 2.0**-15, 3 * 2.0**-24, 2.0**-25, 2.0**-14 - 2.0**-25, 65504.0, 65519.0, 65536.0]
NEAR += [1e30, 1e-30, 1e-45, float("inf"), -float("inf")]


def device_of(impl):
    return DEVICE if impl == "triton" else torch.device("cpu")


def fits(values, dim, impl="auto"):
    return chunked_rows.fits(values.to(device_of(impl)), dim, impl=impl).tolist()


def bits(values):
    return values.cpu().contiguous().view(torch.int32)


def any_bits(rows, width, seed=0):
    """Patterns of float32 that halves hold nearly, exactly and not at all; NaNs with payloads, subnormals."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(-(2**31), 2**31, (rows, width), generator=generator)
    patterns &= torch.tensor([-1, -1 << 12, -1 << 13, -1 << 14, -1 << 16])[
        torch.randint(0, 5, (rows, width), generator=generator)
    ]
    exponents = torch.tensor([0, 1, 102, 103, 112, 113, 127, 142, 143, 255])  # where float16 changes its form
    chosen = exponents[torch.randint(0, 10, (rows, width), generator=generator)] << 23
    some = torch.randint(0, 2, (rows, width), generator=generator) == 0
    return torch.where(some, patterns & ~(255 << 23) | chosen, patterns).to(torch.int32)


class Rows:
    """Chunks of both forms with random bits, `count` rows of each in use.

    `shape` is (chunk_rows, dim, width).
    """

    def __init__(self, shape, count, impl, seed=0):
        chunk_rows, dim, width = shape
        number = -(-count // chunk_rows)
        device = device_of(impl)
        words = any_bits(2 * number * chunk_rows, width, seed).to(device).view(2, number, chunk_rows, width)
        self.full = [each.clone().view(torch.float32) for each in words[0]]
        self.low = [(each >> 8).to(torch.int16) for each in words[1]]
        tables = addresses(self.full, device), addresses(self.low, device)
        self.places, self.impl = Chunks(*tables, count, count, chunk_rows, dim, width), impl

    def read(self, locations, out=None):
        device = device_of(self.impl)
        out = None if out is None else out.to(device)
        return bits(chunked_rows.read_rows(self.places, locations.to(device), out, impl=self.impl))

    def write(self, locations, values):
        device = device_of(self.impl)
        chunked_rows.write_rows(self.places, locations.to(device), values.to(device), impl=self.impl)

    def contents(self):
        """Bits of all rows of both forms, in use or not."""
        full, low = ([each.cpu() for each in chunks] for chunks in (self.full, self.low))
        width = self.places.width
        return [
            torch.cat(full or [torch.empty(0, width)]).view(torch.int32),
            torch.cat(low or [torch.empty(0, width)]).int(),
        ]


def some_locations(count, number, seed=0):
    """Distinct locations of both forms, negative ones between."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.cat([torch.arange(count), torch.arange(count) + LOW, -torch.arange(1, 1 + number)])
    return every[torch.randperm(len(every), generator=generator)][:number]


def check(shape, count, number, impl, seed=0):
    """Reads, writes and `fits` against the reference, bit for bit, and nothing else is touched."""
    locations, width = some_locations(count, number, seed), shape[2]
    values = any_bits(len(locations), width, seed + 1).view(torch.float32)
    kept = any_bits(len(locations), width, seed + 2).view(torch.float32)
    results = []
    for each in ("reference", impl):
        rows = Rows(shape, count, each, seed)
        read = rows.read(locations, kept.clone())
        rows.write(locations, values)
        results.append([read, *rows.contents(), torch.tensor(fits(values, shape[1], each), dtype=torch.bool)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    negative = locations < 0
    assert torch.equal(results[1][0][negative], bits(kept)[negative])


SHAPES = [
    (1, 1, 1),
    (3, 0, 2),
    (5, 3, 4),
    (7, 17, 17),
    (4, 32, 96),
    (6, 127, 127),
    (6, 100, 129),
    (2, 64, 128),
]


@pytest.mark.smoke
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("impl", FAST)
def test_equals_the_reference(impl, shape):
    check(shape, 20, 50, impl)


@pytest.mark.parametrize("number", [0, 1, 15, 16, 17, 33])
@pytest.mark.parametrize("impl", FAST)
def test_numbers_of_rows_around_a_block(impl, number):
    check((5, 3, 4), 40, number, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_every_float16_is_widened_with_its_payload(impl):
    """Also NaN: sign, kind and payload of a half are those of the float."""
    rows, halves = Rows((512, 128, 256), 512, impl), EVERY_HALF.view(torch.int16).view(512, 128)
    rows.low[0].copy_(torch.cat([halves, halves], 1))
    weights, state = rows.read(torch.arange(512) + LOW).split(128, 1)
    expected = EVERY_HALF.to(torch.float32).view(512, 128)
    nan = expected.isnan()
    assert torch.equal(weights[~nan], bits(expected)[~nan])
    assert torch.equal(weights[nan] & 0x7FFFFFFF, 0x7F800000 | (halves.int()[nan] & 0x3FF) << 13)
    assert torch.equal(weights[nan] < 0, halves[nan] < 0)
    assert torch.equal(state, halves.int() << 16)


def float_patterns(zeroed, count):
    """Random bit patterns of float32, NaN left out, with that many low bits cleared."""
    patterns = torch.randint(-(2**31), 2**31, (count,)).to(torch.int32) & (-1 << zeroed)
    values = patterns.view(torch.float32)
    return values[~values.isnan()]


@pytest.mark.parametrize("zeroed", [0, 12, 13, 14, 16, 20])
@pytest.mark.parametrize("impl", FAST)
def test_fits_says_what_torch_finds_by_rounding(impl, zeroed):
    count = 50_000 if impl == "cpu" else 500
    values = torch.cat([float_patterns(zeroed, count), torch.tensor(NEAR), -torch.tensor(NEAR)])
    for dim, form in ((1, torch.float16), (0, torch.bfloat16)):
        same = bits(values.to(form).to(torch.float32)) == bits(values)
        assert fits(values.view(-1, 1), dim, impl) == same.tolist()


@pytest.mark.parametrize("impl", IMPLS)
def test_one_value_that_does_not_fit_is_enough(impl):
    values = torch.ones(5, 4)
    values[1, 0], values[2, 3], values[4, 2] = 1 + 2**-11, 1 + 2**-8, 1 + 2**-10
    assert fits(values, 3, impl) == [True, False, False, True, True]


@pytest.mark.parametrize("chunk_rows", slow_except([5], [1, 5, 1 << 10]))
@pytest.mark.parametrize("impl", FAST)
def test_every_float16_and_bfloat16_comes_back(impl, chunk_rows):
    weights = torch.where(EVERY_HALF.isnan(), 0, EVERY_HALF.to(torch.float32))
    state = EVERY_HALF.view(torch.bfloat16).to(torch.float32).flip(0)
    state = torch.where(state.isnan(), 0, state)
    values = torch.cat([part.view(-1, 128)[torch.randperm(512)] for part in (weights, state)], 1)
    assert all(fits(values, 128, impl))
    rows, locations = Rows((chunk_rows, 128, 256), 512, impl), torch.randperm(512) + LOW
    rows.write(locations, values)
    assert torch.equal(rows.read(locations), bits(values))


OUTSIDE = [[0, 10], [LOW - 1], [-1, LOW + 5], [2**62], [9, LOW, 12, 2**63 - 1]]


@pytest.mark.parametrize("locations", OUTSIDE)
@pytest.mark.parametrize("impl", ["reference", "cpu", pytest.param("triton", marks=pytest.mark.interpreter)])
def test_locations_beyond_the_chunks_are_named_on_the_host(impl, locations):
    chunks, halves = torch.ones(12, 2), torch.ones(12, 2, dtype=torch.int16)
    tables = addresses([chunks], torch.device("cpu")), addresses([halves], torch.device("cpu"))
    places = Chunks(*tables, 10, 5, 12, 1, 2)
    chunked_rows.read_rows(places, torch.tensor([-1, 0, 9, LOW, LOW + 4]), impl=impl)
    values, at = torch.zeros(len(locations), 2), torch.tensor(locations)
    bad = next(each for each in locations if not (each < 10 or LOW <= each < LOW + 5))
    for call in (
        lambda: chunked_rows.read_rows(places, at, impl=impl),
        lambda: chunked_rows.write_rows(places, at, values, impl=impl),
    ):
        with pytest.raises(IndexError, match=f"no row lies at location {bad}"):
            call()
    assert bool((chunks == 1).all()) and bool((halves == 1).all())


@pytest.mark.parametrize("locations", OUTSIDE)
@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.interpreter
def test_locations_beyond_the_chunks_are_left_out_on_a_device(locations, tiers, monkeypatch):
    """Nothing waits there to raise: such a row is neither read nor written."""
    monkeypatch.setattr(op, "on_host", lambda tensor: False)
    rows, kept = Rows((12, 1, 2), 10, "triton"), torch.full((len(locations), 2), 7.0)
    rows.places = rows.places._replace(low_rows=5 * (tiers - 1))
    before, at = rows.contents(), torch.tensor(locations)
    inside = (at < 10) & (at >= 0) | (at >= LOW) & (at < LOW + rows.places.low_rows)
    assert torch.equal(rows.read(at, kept.clone())[~inside], bits(kept)[~inside])
    rows.write(at[~inside], kept[~inside])
    for one, other in zip(rows.contents(), before, strict=True):
        assert torch.equal(one, other)


@pytest.mark.interpreter
def test_the_host_does_not_wait():
    rows, locations, values = Rows((5, 3, 4), 20, "triton"), some_locations(20, 30), torch.ones(30, 4)
    full, low = (on_device(each) for each in rows.places[:2])
    places, locations, values = Chunks(full, low, *rows.places[2:]), on_device(locations), on_device(values)
    with no_sync():
        chunked_rows.write_rows(places, locations, values, impl="triton")
        got = chunked_rows.read_rows(places, locations, values.clone(), impl="triton")
        exact = chunked_rows.fits(values, 3, impl="triton")
    assert torch.equal(got, values) and bool(exact.all())


def test_a_table_of_addresses_keeps_its_chunks_and_nothing_keeps_the_table():
    chunks = [torch.ones(3, 2) for _ in range(2)]
    pointers, kept = [each.data_ptr() for each in chunks], [weakref.ref(each) for each in chunks]
    table = addresses(chunks, torch.device("cpu"))
    entry = id(table)
    del chunks
    gc.collect()
    assert table.tolist() == pointers and all(each() is not None for each in kept)
    del table
    gc.collect()
    assert all(each() is None for each in kept) and entry not in address_table._behind


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: addresses([torch.ones(4, 4)[:, :2]], torch.device("cpu")), r"chunk 0 of shape \(4, 2\)"),
        (lambda p: addresses([torch.ones(4, 4, device="meta")], torch.device("cpu")), "chunk 0 on meta"),
        (lambda p: chunked_rows.read_rows(p, torch.zeros(3)), r"locations must be \(K,\) int64"),
        (lambda p: chunked_rows.read_rows(p, torch.arange(3), torch.zeros(2, 4)), r"out must be \(3, 4\)"),
        (
            lambda p: chunked_rows.write_rows(p, torch.arange(3), torch.zeros(3, 5)),
            r"values must be \(3, 4\)",
        ),
        (lambda p: chunked_rows.write_rows(p, torch.arange(3), torch.zeros(4, 3).t()), "contiguous"),
        (lambda p: chunked_rows.fits(torch.zeros(3, 4).long(), 1), "values must be"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(Rows((5, 3, 4), 20, "cpu").places)


def test_chunks_on_a_device_without_its_number():
    """ "cuda" means the current one, where tensors say "cuda:0"; so does "cpu:0" mean the CPU."""
    chunk = torch.zeros(4, 3)
    assert addresses([chunk], torch.device("cpu:0")).tolist() == [chunk.data_ptr()]
