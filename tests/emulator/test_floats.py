"""Float instructions of PTX equal numpy's and the C library's, bit by bit where PTX rounds to nearest."""

import ctypes
import ctypes.util
import math

import numpy as np
import pytest
import torch
from ptx_kit import evaluate

from tritonrec.harness.emulator import UnsupportedError

pytestmark = pytest.mark.slow  # compiles the emulator's runtime

COUNT = 256
LIBM = ctypes.CDLL(ctypes.util.find_library("m"))
LIBM.fmaf.restype, LIBM.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
LIBM.fma.restype, LIBM.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
EDGES = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    math.inf,
    -math.inf,
    math.nan,
    1e-40,
    -1e-41,
    3.4e38,
    2.5,
    -3.5,
    2.0**31,
    -(2.0**31),
]


def numbers(kind, seed=0):
    """Numbers of all sizes, both zeros, infinities, NaN and subnormals."""
    generator = np.random.default_rng([seed, 7])
    drawn = generator.standard_normal(COUNT) * 2.0 ** generator.integers(-30, 30, COUNT)
    drawn[-60:] = generator.choice(np.array(EDGES), 60)
    return drawn.astype("f4" if kind == "f32" else "f8")


def pairs(kind):
    """Every edge with every other."""
    edges = np.array(EDGES).astype("f4" if kind == "f32" else "f8")
    return np.repeat(edges, len(edges)), np.tile(edges, len(edges))


def bits(x):
    return x.view(f"u{x.itemsize}")


def assert_equal(got, expected):
    """In every bit; any NaN equals any other."""
    got = got.view(expected.dtype)
    same = (bits(got) == bits(expected)) | (np.isnan(got) & np.isnan(expected))
    assert same.all(), list(zip(got[~same][:5], expected[~same][:5], strict=True))


def flushed(x):
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x).astype(
        np.float32
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", ["add.rn", "sub.rn", "mul.rn", "div.rn", "add", "mul"])
def test_two_operands(name, kind):
    x, y = numbers(kind), numbers(kind, 1)
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name.split(".")[0]]
    got = evaluate(f"{name}.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, kind, [x, y])
    assert_equal(got, function(x, y))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["add", "mul", "sub"])
def test_flush_to_zero(name):
    generator = np.random.default_rng(3)
    x, y = (generator.standard_normal(COUNT).astype(np.float32) * np.float32(2.0**-70) for _ in range(2))
    x[:40] = numbers("f32")[-40:]
    function = {"add": np.add, "mul": np.multiply, "sub": np.subtract}[name]
    scaled = [x, y] if name == "mul" else [x * np.float32(2.0**-57), y * np.float32(2.0**-57)]
    got = evaluate(f"{name}.rn.ftz.f32 {{d}}, {{0}}, {{1}};", ["f32"] * 2, "f32", scaled)
    assert_equal(got, flushed(function(*map(flushed, scaled))))
    assert (got.view(np.float32) == 0).any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_fused_multiply_and_add_rounds_once(kind):
    x, y, z = numbers(kind), numbers(kind, 1), numbers(kind, 2)
    z[:100] = -(x * y)[:100]  # the rounding error of the product is what is left
    function = LIBM.fmaf if kind == "f32" else LIBM.fma
    expected = np.array(
        [function(float(a), float(b), float(c)) for a, b, c in zip(x, y, z, strict=True)], x.dtype
    )
    got = evaluate(f"fma.rn.{kind} {{d}}, {{0}}, {{1}}, {{2}};", [kind] * 3, kind, [x, y, z])
    assert_equal(got, expected)
    assert (expected[:100] != 0).any()


def smaller(a, b, sign):
    """IEEE's minimumNumber of signed zeros; sign -1 for the larger one."""
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    if a == b:
        return a if math.copysign(1, a) * sign < 0 else b
    return min(a * sign, b * sign) * sign


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_minimum_and_maximum_know_signed_zeros_and_nan(name, kind):
    x, y = pairs(kind)
    sign = 1 if name == "min" else -1
    expected = np.array([smaller(float(a), float(b), sign) for a, b in zip(x, y, strict=True)], x.dtype)
    assert_equal(evaluate(f"{name}.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, kind, [x, y]), expected)
    if kind == "f32":
        expected[np.isnan(x) | np.isnan(y)] = math.nan
        got = evaluate(f"{name}.NaN.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, kind, [x, y])
        assert_equal(got, expected)


COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal}  # fmt: skip


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("how", COMPARE)
def test_comparisons_with_nan(how, kind):
    x, y = pairs(kind)
    unordered = np.isnan(x) | np.isnan(y)
    ordered = COMPARE[how](x, y) & ~unordered
    got = evaluate(f"setp.{how}.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, "pred", [x, y])
    assert got.astype(bool).tolist() == ordered.tolist()
    got = evaluate(f"setp.{how}u.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, "pred", [x, y])
    assert got.astype(bool).tolist() == (ordered | unordered).tolist()
    for name, expected in (("nan", unordered), ("num", ~unordered)):
        got = evaluate(f"setp.{name}.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, "pred", [x, y])
        assert got.astype(bool).tolist() == expected.tolist()
    for half, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        a, b = (torch.from_numpy(v.astype("f4")).to(dtype) for v in (x, y))
        expected = COMPARE[how](a.float().numpy(), b.float().numpy()) & ~unordered
        operands = [v.view(torch.int16).numpy() for v in (a, b)]
        got = evaluate(f"setp.{how}.{half} {{d}}, {{0}}, {{1}};", [half] * 2, "pred", operands)
        assert got.astype(bool).tolist() == expected.tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mode", ["rmi", "rpi", "rzi", "rni"])
def test_rounding_to_whole_numbers(mode):
    function = {"rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc, "rni": np.rint}[mode]
    for kind in ("f32", "f64"):
        x = numbers(kind)
        x[:20] = np.arange(20) - 9.5
        assert_equal(evaluate(f"cvt.{mode}.{kind}.{kind} {{d}}, {{0}};", [kind], kind, [x]), function(x))


@pytest.mark.parametrize("to", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_floats_to_integers_saturate(kind, to):
    x = numbers(kind)
    x[:20] = np.arange(20) - 9.5
    x[20:26] = 2.0**63, 2.0**64, -(2.0**63), 2.0**32, 2.0**31 - 1, -(2.0**40)
    wide = int(to[1:])
    low, high = (-(2 ** (wide - 1)), 2 ** (wide - 1) - 1) if to[0] == "s" else (0, 2**wide - 1)
    of_nan = 0 if kind == "f32" and wide == 32 else 2 ** (wide - 1)

    def whole(v):
        if math.isnan(v):
            return of_nan
        return high if v > high else low if v < low else int(v)

    got = evaluate(f"cvt.rzi.{to}.{kind} {{d}}, {{0}};", [kind], to, [x]).view(f"u{wide // 8}")
    assert [int(g) for g in got] == [whole(float(v)) & (2**wide - 1) for v in x]


@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_integers_to_floats_round_to_nearest(kind, source):
    generator = np.random.default_rng(11)
    wide = int(source[1:]) // 8
    x = generator.integers(0, 256, COUNT * wide, dtype=np.uint8).view(
        f"{'i' if source[0] == 's' else 'u'}{wide}"
    )
    expected = x.astype("f4" if kind == "f32" else "f8")
    assert_equal(evaluate(f"cvt.rn.{kind}.{source} {{d}}, {{0}};", [source], kind, [x]), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_conversions_to_half_precision_round_to_nearest_even(half):
    x, y = numbers("f32"), numbers("f32", 1)
    x[:64] = (np.arange(64, dtype=np.uint32) * 0x2000 + 0x3F800000 + 0x1000).view(
        np.float32
    )  # ties of float16
    x[64:128] = (np.arange(64, dtype=np.uint32) * 0x10000 + 0x3F808000).view(np.float32)  # and of bfloat16
    dtype = torch.bfloat16 if half == "bf16" else torch.float16
    halves = [torch.from_numpy(v).to(dtype) for v in (x, y)]
    as_float = [h.float().numpy() for h in halves]
    got = evaluate(f"cvt.rn.{half}.f32 {{d}}, {{0}};", ["f32"], half, [x])
    back = torch.from_numpy(got.copy()).view(dtype).float().numpy()
    assert_equal(back, as_float[0])
    pair = evaluate(f"cvt.rn.{half}x2.f32 {{d}}, {{0}}, {{1}};", ["f32", "f32"], "b32", [x, y]).view(np.int16)
    low, high = (
        torch.from_numpy(part.copy()).view(dtype).float().numpy() for part in (pair[::2], pair[1::2])
    )
    assert_equal(high, as_float[0])
    assert_equal(low, as_float[1])
    words = halves[0].view(torch.int16).numpy()
    assert_equal(evaluate(f"cvt.f32.{half} {{d}}, {{0}};", [half], "f32", [words]), as_float[0])
    wide = evaluate(f"cvt.f64.{half} {{d}}, {{0}};", [half], "f64", [words])
    assert_equal(wide, as_float[0].astype(np.float64))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_float64_and_float32():
    x, y = numbers("f32"), numbers("f64")
    assert_equal(evaluate("cvt.f64.f32 {d}, {0};", ["f32"], "f64", [x]), x.astype(np.float64))
    assert_equal(evaluate("cvt.rn.f32.f64 {d}, {0};", ["f64"], "f32", [y]), y.astype(np.float32))


@pytest.mark.parametrize(("to", "source"), [("bf16", "f64"), ("f16", "f64"), ("f16", "s32"), ("u32", "f16")])
def test_a_conversion_that_is_not_known_is_refused(to, source):
    values = numbers("f64").view(np.int64 if source == "f64" else np.int32 if source == "s32" else np.int16)
    with pytest.raises(UnsupportedError, match=rf"cvt\.rn\.{to}\.{source}"):
        evaluate(f"cvt.rn.{to}.{source} {{d}}, {{0}};", [source], to, [values])


FUNCTIONS = {
    "ex2.approx": np.exp2, "lg2.approx": np.log2, "sin.approx": np.sin, "cos.approx": np.cos,
    "tanh.approx": np.tanh, "rcp.rn": lambda x: 1 / x, "sqrt.rn": np.sqrt,
    "rsqrt.approx": lambda x: 1 / np.sqrt(x),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_rounded_at_most_twice(name):
    x = numbers("f32")
    x[:150] = np.random.default_rng(1).uniform(-20, 20, 150)
    exact = FUNCTIONS[name](x.astype(np.float64)).astype(np.float32)
    got = evaluate(f"{name}.f32 {{d}}, {{0}};", ["f32"], "f32", [x]).view(np.float32)
    finite = np.isfinite(exact)
    assert (np.isnan(got) == np.isnan(exact)).all()
    assert (got[~finite & ~np.isnan(exact)] == exact[~finite & ~np.isnan(exact)]).all()
    # one unit in the last place; a correctly rounded instruction has none
    units = 0 if name.endswith(".rn") else 1
    assert (np.abs(got - exact)[finite] <= units * np.spacing(np.abs(exact[finite]))).all()


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_signs(kind):
    x = numbers(kind)
    sign = np.array(1 << (8 * x.itemsize - 1), dtype=f"u{x.itemsize}")
    negated = evaluate(f"neg.{kind} {{d}}, {{0}};", [kind], kind, [x])
    assert (negated.view(bits(x).dtype) == bits(x) ^ sign).all()
    absolute = evaluate(f"abs.{kind} {{d}}, {{0}};", [kind], kind, [x])
    assert (absolute.view(bits(x).dtype) == bits(x) & ~sign).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_immediate_floats():
    x = numbers("f32")
    got = evaluate("mul.rn.f32 {d}, {0}, 0f3FB8AA3B;", ["f32"], "f32", [x])
    assert_equal(got, x * np.array([0x3FB8AA3B], np.uint32).view(np.float32))
    y = numbers("f64")
    got = evaluate("add.rn.f64 {d}, {0}, 0d4338000000000000;", ["f64"], "f64", [y])
    assert_equal(got, y + 6755399441055744.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_half_precision_arithmetic(half):
    dtype = torch.bfloat16 if half == "bf16" else torch.float16
    x, y, z = (torch.from_numpy(numbers("f32", seed)).to(dtype) for seed in range(3))
    operands = [v.view(torch.int16).numpy() for v in (x, y, z)]
    exact = [v.double() for v in (x, y, z)]
    cases = {
        "add": exact[0] + exact[1], "sub": exact[0] - exact[1], "mul": exact[0] * exact[1],
        "fma.rn": exact[0] * exact[1] + exact[2], "neg": -exact[0], "abs": exact[0].abs(),
    }  # fmt: skip
    for name, expected in cases.items():
        count = {"fma.rn": 3, "neg": 1, "abs": 1}.get(name, 2)
        names = ", ".join(f"{{{i}}}" for i in range(count))
        got = evaluate(f"{name}.{half} {{d}}, {names};", [half] * count, half, operands[:count])
        want = expected.float().to(dtype).float().numpy()
        assert_equal(torch.from_numpy(got.copy()).view(dtype).float().numpy(), want)
        pairs = [o.view(np.int32) for o in operands[:count]]
        got = evaluate(f"{name}.{half}x2 {{d}}, {names};", ["b32"] * count, "b32", pairs).view(np.int16)
        assert_equal(torch.from_numpy(got.copy()).view(dtype).float().numpy(), want)


def test_rounding_to_tf32():
    """10 binary digits behind the point, halves away from zero, by their definition."""
    drawn = numbers("f32", 11)
    halves = np.ldexp(np.arange(1025, 2049, 2, dtype=np.float32) / 1024, 1)
    x = np.concatenate([drawn, halves + np.float32(2**-10), -halves - np.float32(2**-10)]).astype(np.float32)
    got = evaluate("cvt.rna.tf32.f32 {d}, {0};", ["f32"], "f32", [x]).view(np.float32)
    wide = x.astype(np.float64)
    finite = np.isfinite(wide)
    exponent = np.maximum(np.frexp(np.where(finite, wide, 1))[1], -125)  # a subnormal has the least exponent
    scaled = np.ldexp(np.where(finite, wide, 0), 11 - exponent)
    expected = np.ldexp(np.sign(scaled) * np.floor(np.abs(scaled) + 0.5), exponent - 11)
    expected = np.where(finite, np.copysign(expected, wide), wide)
    assert_equal(got, expected.astype(np.float32))
