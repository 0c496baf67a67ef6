"""Promise: a fused multiply-add is rounded once, in a reference and in the kernels of the CPU."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from tritonrec.kernels.caches import njit
from tritonrec.kernels.fused import fused_multiply_add
from tritonrec.kernels.numba_float import dot, fma

LARGEST = float(np.finfo(np.float32).max)


def rounded(value: Fraction) -> float:
    """To the nearest float32, to even in a tie, from the two that enclose it."""
    near = np.float32(float(value))
    around = {
        float(each)
        for each in (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf)))
    }
    distance = {each: abs(Fraction(each) - value) for each in around if np.isfinite(each)}
    least = min(distance.values())
    nearest = [each for each in distance if distance[each] == least]
    return min(nearest, key=lambda each: int(np.float32(each).view(np.int32)) & 1)


def numbers():
    """Random ones, with sums that nearly cancel, ties, and a last bit that decides about one."""
    generator = np.random.default_rng(5)
    a, b = (generator.standard_normal(3000).astype(np.float32) for _ in range(2))
    c = (generator.standard_normal(3000) * 2.0 ** generator.integers(-40, 20, 3000)).astype(np.float32)
    c[:1000] = -(a * b)[:1000]
    ties = [(1 + 2**-12, 1 + 2**-12, 0.0), (1 + 2**-12, 1 - 2**-12, 2.0**-60), (1.0, 2.0**-24, 1.0)]
    ties += [(1.0, 2.0**-24, 1 + 2**-23), (-1.0, 2.0**-25, 1.0), (2.0**-24, 1 + 2**-23, 1.0), (0.0, 3.0, 0.0)]
    # 1 + 2**-24, and a little: the float64 next to it is odd, and behind the sum
    ties += [(24929.0, 673 * 2.0**-24, 0.75 * 2.0**-52), (-24929.0, 673 * 2.0**-24, -0.75 * 2.0**-52)]
    # and so little that the float64 is the tie itself, which is even
    ties += [
        (sign * 24929.0, 673 * 2.0**-24, little) for sign in (1, -1) for little in (2.0**-60, -(2.0**-60))
    ]
    more = np.array(ties, np.float32).T
    return [np.concatenate([each, own]) for each, own in zip((a, b, c), more, strict=True)]


@njit()
def every(a, b, c, out):
    for i in range(a.shape[0]):
        out[i] = fma(a[i], b[i], c[i])


def test_it_is_rounded_once():
    a, b, c = numbers()
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)
    ]
    expected = torch.tensor([rounded(each) for each in exact], dtype=torch.float32)
    assert torch.equal(fused_multiply_add(*map(torch.from_numpy, (a, b, c))), expected)
    out = np.empty_like(a)
    every(a, b, c, out)
    assert torch.equal(torch.from_numpy(out), expected)
    twice = torch.from_numpy(a * b + c)
    assert not torch.equal(twice, expected)  # else a rounding more would not be seen


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        (torch.inf, 2.0, 1.0, torch.inf),
        (torch.inf, 0.0, 1.0, torch.nan),
        (torch.inf, 1.0, -torch.inf, torch.nan),
        (LARGEST, 2.0, -LARGEST, LARGEST),
        (LARGEST, 2.0, LARGEST, torch.inf),
        (torch.nan, 0.0, 0.0, torch.nan),
    ],
)
def test_numbers_without_a_sum(a, b, c, expected):
    numbers = [torch.tensor([each], dtype=torch.float32) for each in (a, b, c)]
    out = np.empty(1, np.float32)
    every(*(each.numpy() for each in numbers), out)
    for got in (fused_multiply_add(*numbers), torch.from_numpy(out)):
        assert torch.equal(got.nan_to_num(7.0), torch.tensor([expected]).nan_to_num(7.0))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 48, 63])
def test_a_dot_product_is_sixteen_fused_sums_and_those_of_the_rest(count):
    a, b, _ = (torch.from_numpy(each)[1000 : 1000 + count] for each in numbers())
    lanes = torch.zeros(16)
    for block in range(count // 16):
        part = slice(16 * block, 16 * block + 16)
        lanes = fused_multiply_add(a[part], b[part], lanes)
    for width in (8, 4, 2, 1):
        lanes = lanes[:width] + lanes[width : 2 * width]
    tail = torch.zeros(1)
    for i in range(count // 16 * 16, count):
        tail = fused_multiply_add(a[i : i + 1], b[i : i + 1], tail)
    place = np.uintp(0)
    assert dot(a.numpy(), place, b.numpy(), place, np.uintp(count)) == (lanes + tail).item()
