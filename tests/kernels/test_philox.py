"""Random numbers are a pure function of what they are for, the same in every bit in all implementations."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from impls import TRITON, on

from tritonrec.kernels.philox import reference
from tritonrec.kernels.philox.op import derive_seed, initial_rows, initial_rows_of_tables, random_indices
from tritonrec.kernels.philox.triton_philox import philox4x32 as triton_philox4x32

SMALLEST, LARGEST = -(2**63), 2**63 - 1
KEYS = torch.tensor([0, 1, -1, SMALLEST, LARGEST, 2**32, -(2**32), 12345678901234567, 7])

# Random123 1.14, kat_vectors, philox4x32 with 10 rounds: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@triton.jit
def words_kernel(input_ptr, words_ptr):
    zero = tl.arange(0, 1)
    c0 = (tl.load(input_ptr + 0) + zero).to(tl.uint32)
    c1 = (tl.load(input_ptr + 1) + zero).to(tl.uint32)
    c2 = (tl.load(input_ptr + 2) + zero).to(tl.uint32)
    c3 = (tl.load(input_ptr + 3) + zero).to(tl.uint32)
    k0 = (tl.load(input_ptr + 4) + zero).to(tl.uint32)
    k1 = (tl.load(input_ptr + 5) + zero).to(tl.uint32)
    w0, w1, w2, w3 = triton_philox4x32(c0, c1, c2, c3, k0, k1)
    tl.store(words_ptr + 0 + zero, w0.to(tl.int64))
    tl.store(words_ptr + 1 + zero, w1.to(tl.int64))
    tl.store(words_ptr + 2 + zero, w2.to(tl.int64))
    tl.store(words_ptr + 3 + zero, w3.to(tl.int64))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    from tritonrec.kernels.philox.numba_philox import philox4x32

    assert reference.philox4x32(counter, key) == words
    assert tuple(int(w) for w in philox4x32(*map(np.uint32, counter + key))) == words


@pytest.mark.interpreter
@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers_in_triton(counter, key, words):
    out = on("triton", torch.full((4,), -1))
    words_kernel[(1,)](on("triton", torch.tensor(counter + key)), out)
    assert tuple(out.tolist()) == words


@pytest.mark.smoke
@pytest.mark.parametrize("impl", ["reference", "cpu", TRITON])
def test_first_row_is_the_known_answer(impl):
    rows = initial_rows(0, 0, on(impl, torch.tensor([0])), 4, 0.5, impl=impl)
    expected = [((word >> 8) - 2**23) / 2**23 * 0.5 for word in KNOWN[0][2]]
    assert rows.tolist() == [expected]


@pytest.mark.parametrize(
    ("num_rows", "dim"),
    [*((None, d) for d in (0, 1, 3, 4, 5, 64, 257)), *((n, 6) for n in (0, 1, 127, 128, 129))],
)
@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_initial_rows_equal_the_reference(impl, num_rows, dim):
    draw = torch.Generator().manual_seed(3)
    keys = KEYS if num_rows is None else torch.randint(SMALLEST, LARGEST, (num_rows,), generator=draw)
    rows = initial_rows(-5, 2**32 - 1, on(impl, keys), dim, 0.3, impl=impl).cpu()
    assert torch.equal(rows, initial_rows(-5, 2**32 - 1, keys, dim, 0.3, impl="reference"))


@pytest.mark.parametrize("width", [0, 1, 4, 7, 261])
@pytest.mark.parametrize("impl", ["reference", "cpu", TRITON])
def test_rows_of_tables_are_those_of_each_and_zeros_behind_them(impl, width):
    generator = torch.Generator().manual_seed(width)
    tables, dims = (torch.randint(2**32, (len(KEYS),), generator=generator) for _ in range(2))
    dims, scales = dims % (width + 3) - 1, torch.rand(len(KEYS), generator=generator)
    given = (on(impl, each) for each in (tables + (5 << 32), KEYS, dims, scales))
    rows = initial_rows_of_tables(-5, *given, width, impl=impl).cpu()
    assert rows.shape == (len(KEYS), width)
    facts = (each.tolist() for each in (tables, dims, scales))
    for row, key, table, dim, scale in zip(rows, KEYS.split(1), *facts, strict=True):
        own = initial_rows(-5, table, key, min(max(dim, 0), width), scale, impl="reference")[0]
        assert torch.equal(row[: len(own)], own) and not row[len(own) :].any()


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 130])
@pytest.mark.parametrize("upper", [1, 7, 100003, 2**32])
@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_random_indices_equal_the_reference(impl, upper, count):
    positions = KEYS.flip(0) + 3
    arguments = (on(impl, KEYS), on(impl, positions), count, upper)
    indices = random_indices(4, 2, LARGEST, *arguments, impl=impl).cpu()
    expected = random_indices(4, 2, LARGEST, KEYS, positions, count, upper, impl="reference")
    assert torch.equal(indices, expected)
    assert count == 0 or (indices.min() >= 0 and indices.max() < upper)


def test_every_argument_counts():
    keys = torch.arange(100)
    rows = initial_rows(1, 2, keys, 8, 0.1)
    others = [initial_rows(s, t, k, 8, 0.1) for s, t, k in ((2, 2, keys), (1, 3, keys), (1, 2, keys + 2**32))]
    others.append(initial_rows(1 + 2**32, 2, keys, 8, 0.1))
    indices = random_indices(1, 2, 3, keys, keys, 8, 10**9)
    changed = ((2, 2, 3, keys, keys), (1, 3, 3, keys, keys), (1, 2, 4, keys, keys), (1, 2, 3, keys + 1, keys))
    for other in others:
        assert (other == rows).float().mean() < 0.01
    for arguments in (*changed, (1, 2, 3, keys, keys + 1), (1, 2, 3 + 2**32, keys, keys)):
        assert (random_indices(*arguments, 8, 10**9) == indices).float().mean() < 0.01


def test_distributions_are_uniform():
    keys = torch.arange(20_000)
    rows = initial_rows(0, 0, keys, 8, 0.25).double()
    assert rows.min() >= -0.25 and rows.max() < 0.25
    assert abs(rows.mean()) < 4 * 0.25 / (3 * rows.numel()) ** 0.5
    assert rows.var() == pytest.approx(0.25**2 / 3, rel=0.01)
    indices = random_indices(0, 0, 0, keys, keys, 8, 10)
    expected = indices.numel() / 10
    assert ((torch.bincount(indices.flatten(), minlength=10) - expected) ** 2 / expected).sum() < 33.7  # 1e-4


def test_derived_seeds_fit_int64_and_differ():
    seeds = {derive_seed(seed, stream, step) for seed in range(5) for stream in range(5) for step in range(5)}
    assert len(seeds) == 125 and all(SMALLEST <= seed <= LARGEST for seed in seeds)


def test_seed_stream_and_step_come_in_this_order():
    keys, places = torch.arange(3), torch.arange(3)
    expected = reference.random_indices(5, 2, 9, keys, places, 4, 1000)
    assert torch.equal(random_indices(5, 2, 9, keys, places, 4, 1000), expected)
    for other in ((2, 5, 9), (5, 9, 2), (9, 2, 5)):
        assert not torch.equal(random_indices(*other, keys, places, 4, 1000), expected)
