"""Integer instructions of PTX equal Python's integers, at random numbers and at the ends of their types."""

import numpy as np
import pytest
from ptx_kit import evaluate

pytestmark = pytest.mark.slow  # compiles the emulator's runtime

COUNT = 160


def numbers(kind, seed=0):
    """Random bits, small numbers, and the ends of the type."""
    bits = int(kind[1:])
    generator = np.random.default_rng([seed, bits])
    drawn = generator.integers(0, 2**bits, COUNT, dtype=np.uint64, endpoint=False)
    drawn[: COUNT // 4] = generator.integers(0, 70, COUNT // 4)
    edges = [0, 1, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1]
    drawn[-25:] = generator.choice(np.array(edges, dtype=np.uint64), 25)
    return drawn.astype(f"u{bits // 8}")


def value(x, kind):
    """An element as the integer that `kind` makes of its bits."""
    bits = int(kind[1:])
    x = int(x) & (2**bits - 1)
    return x - 2**bits if kind[0] == "s" and x >> (bits - 1) else x


def quotient(a, b):
    """Rounded towards 0, as C does."""
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


TWO = {
    "add": lambda a, b, n: a + b,
    "sub": lambda a, b, n: a - b,
    "mul.lo": lambda a, b, n: a * b,
    "min": lambda a, b, n: min(a, b),
    "max": lambda a, b, n: max(a, b),
}


def check(instruction, kinds, out, function, inputs):
    got = evaluate(instruction, kinds, out, inputs)
    bits = 1 if out == "pred" else int(out[1:])
    for k in range(len(inputs[0])):
        operands = [value(x[k], kind) for x, kind in zip(inputs, kinds, strict=True)]
        expected = int(function(*operands)) & (2**bits - 1)
        assert int(got[k]) & (2**bits - 1) == expected, (instruction, operands)


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "s16", "u16"])
@pytest.mark.parametrize("name", TWO)
def test_two_operands(name, kind):
    inputs = [numbers(kind), numbers(kind, 1)]
    bits = int(kind[1:])
    check(f"{name}.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, kind, lambda a, b: TWO[name](a, b, bits), inputs)


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_division_rounds_towards_zero(kind):
    a, b = numbers(kind), numbers(kind, 1)
    b[b == 0] = 7
    low = 2 ** (int(kind[1:]) - 1)
    if kind[0] == "s":  # the one quotient that does not fit
        b[(a == low) & (b == 2 * low - 1)] = 3
    check(f"div.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, kind, quotient, [a, b])
    check(f"rem.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, kind, lambda x, y: x - y * quotient(x, y), [a, b])


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_division_without_a_quotient_does_not_stop_the_process(kind):
    low = np.array([2 ** (int(kind[1:]) - 1)] * 2, dtype=f"u{int(kind[1:]) // 8}")
    evaluate(f"div.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, kind, [low, np.array([0, -1]).astype(low.dtype)])


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_bitwise(name, kind):
    function = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}[name]
    inputs = [numbers(kind), numbers(kind, 1)]
    check(f"{name}.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, kind, function, inputs)
    check(f"not.{kind} {{d}}, {{0}};", [kind], kind, lambda a: ~a, inputs[:1])


@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_predicates(name):
    inputs = [np.arange(32, dtype=np.uint8) & 1, np.arange(32, dtype=np.uint8) >> 1 & 1]
    function = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}[name]
    got = evaluate(f"{name}.pred {{d}}, {{0}}, {{1}};", ["pred"] * 2, "pred", inputs)
    assert got.tolist() == [function(int(a), int(b)) for a, b in zip(*inputs, strict=True)]


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "s16", "s32", "s64", "u16", "u32", "u64"])
def test_shifts_by_more_than_the_width_leave_zeros_or_signs(kind):
    bits = int(kind[1:])
    values = numbers(kind)
    by = np.random.default_rng(2).integers(0, 2 * bits + 3, COUNT).astype(np.uint32)
    by[-3:] = 2**31, 2**32 - 1, bits
    if kind[0] == "b":
        check(
            f"shl.{kind} {{d}}, {{0}}, {{1}};",
            [kind, "u32"],
            kind,
            lambda a, n: a << min(n, 64),
            [values, by],
        )
    if kind[0] != "b":
        check(
            f"shr.{kind} {{d}}, {{0}}, {{1}};",
            [kind, "u32"],
            kind,
            lambda a, n: a >> min(n, 64),
            [values, by],
        )
        check(f"shr.{kind} {{d}}, {{0}}, 5;", [kind], kind, lambda a: a >> 5, [values])


@pytest.mark.parametrize("kind", ["s32", "u32", "s16", "u16"])
def test_wide_products(kind):
    out = kind[0] + str(2 * int(kind[1:]))
    inputs = [numbers(kind), numbers(kind, 1)]
    check(f"mul.wide.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, out, lambda a, b: a * b, inputs)
    check(f"mul.wide.{kind} {{d}}, {{0}}, 12;", [kind], out, lambda a: a * 12, inputs[:1])
    if kind[1:] == "32":
        inputs.append(numbers(out, 2))
        check(
            f"mad.wide.{kind} {{d}}, {{0}}, {{1}}, {{2}};",
            [kind, kind, out],
            out,
            lambda a, b, c: a * b + c,
            inputs,
        )


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_high_halves_and_sums_of_products(kind):
    bits = int(kind[1:])
    inputs = [numbers(kind), numbers(kind, 1), numbers(kind, 2)]
    check(f"mul.hi.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, kind, lambda a, b: a * b >> bits, inputs[:2])
    check(f"mad.lo.{kind} {{d}}, {{0}}, {{1}}, {{2}};", [kind] * 3, kind, lambda a, b, c: a * b + c, inputs)


@pytest.mark.parametrize("kind", ["s32", "s64"])
def test_negation_absolute_value_and_relu(kind):
    x, y = numbers(kind), numbers(kind, 1)
    check(f"neg.{kind} {{d}}, {{0}};", [kind], kind, lambda a: -a, [x])
    check(f"abs.{kind} {{d}}, {{0}};", [kind], kind, abs, [x])
    if kind == "s32":
        check("max.relu.s32 {d}, {0}, {1};", [kind] * 2, kind, lambda a, b: max(a, b, 0), [x, y])
        check("min.relu.s32 {d}, {0}, {1};", [kind] * 2, kind, lambda a, b: max(min(a, b), 0), [x, y])


@pytest.mark.parametrize("name", ["add", "sub", "min", "max"])
@pytest.mark.parametrize("kind", ["s16x2", "u16x2"])
def test_pairs_of_16_bits(kind, name):
    x, y = numbers("b32"), numbers("b32", 1)
    got = evaluate(f"{name}.{kind} {{d}}, {{0}}, {{1}};", ["b32"] * 2, "b32", [x, y]).view(np.uint16)
    halves = [[value(v, f"{kind[0]}16") for v in operand.view(np.uint16)] for operand in (x, y)]
    assert got.tolist() == [TWO[name](a, b, 16) & 0xFFFF for a, b in zip(*halves, strict=True)]


COMPARE = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("how", COMPARE)
def test_comparisons_and_selections(how, kind):
    a, b = numbers(kind), numbers(kind, 1)
    b[::3] = a[::3]
    got = evaluate(f"setp.{how}.{kind} {{d}}, {{0}}, {{1}};", [kind] * 2, "pred", [a, b])
    expected = [COMPARE[how](value(x, kind), value(y, kind)) for x, y in zip(a, b, strict=True)]
    assert got.tolist() == [int(e) for e in expected]
    chosen = evaluate(
        f"selp.b{kind[1:]} {{d}}, {{0}}, {{1}}, {{2}};",
        [kind, kind, "pred"],
        kind,
        [a, b, got.astype(np.uint8)],
    )
    assert chosen.astype(a.dtype).tolist() == np.where(expected, a, b).tolist()


def field(a, start, length, signed):
    """PTX's definition of bfe, bit by bit."""
    start, length = start & 255, length & 255
    sign = (a >> min(start + length - 1, 31)) & 1 if signed and length else 0
    return sum(((a >> (i + start)) & 1 if i < length and i + start < 32 else sign) << i for i in range(32))


def inserted(a, b, start, length):
    start, length = start & 255, length & 255
    for i in range(length):
        if start + i < 32:
            b = b & ~(1 << (start + i)) | ((a >> i) & 1) << (start + i)
    return b


def test_bit_fields():
    generator = np.random.default_rng(5)
    a, b = numbers("b32"), numbers("b32", 1)
    start, length = (generator.integers(0, 40, COUNT).astype(np.uint32) for _ in range(2))
    start[-2:], length[-2:] = (255, 31), (3, 0)
    kinds = ["b32", "u32", "u32"]
    for kind in ("u32", "s32"):
        check(
            f"bfe.{kind} {{d}}, {{0}}, {{1}}, {{2}};", kinds, "b32",
            lambda x, s, n, kind=kind: field(x, s, n, kind == "s32"), [a, start, length],
        )  # fmt: skip
    check("bfi.b32 {d}, {0}, {1}, {2}, {3};", ["b32", *kinds], "b32", inserted, [a, b, start, length])


def test_permutations_and_funnel_shifts():
    a, b, by = numbers("b32"), numbers("b32", 1), numbers("b32", 2)

    def permuted(x, y, select):
        both, out = x | y << 32, 0
        for i in range(4):
            nibble = select >> 4 * i & 15
            byte = both >> 8 * (nibble & 7) & 255
            out |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
        return out

    check("prmt.b32 {d}, {0}, {1}, {2};", ["b32"] * 3, "b32", permuted, [a, b, by])
    check("shf.l.wrap.b32 {d}, {0}, {1}, {2};", ["b32"] * 3, "b32",
          lambda x, y, n: ((y << 32 | x) << (n & 31)) >> 32, [a, b, by])  # fmt: skip
    check("shf.r.wrap.b32 {d}, {0}, {1}, {2};", ["b32"] * 3, "b32",
          lambda x, y, n: (y << 32 | x) >> (n & 31), [a, b, by])  # fmt: skip
    check("shf.r.clamp.b32 {d}, {0}, {1}, {2};", ["b32"] * 3, "b32",
          lambda x, y, n: (y << 32 | x) >> min(n, 32), [a, b, by])  # fmt: skip
    check("shf.l.clamp.b32 {d}, {0}, {1}, {2};", ["b32"] * 3, "b32",
          lambda x, y, n: ((y << 32 | x) << min(n, 32)) >> 32, [a, b, by])  # fmt: skip


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_counts_of_bits(kind):
    bits, x = int(kind[1:]), numbers(kind)
    check(f"popc.{kind} {{d}}, {{0}};", [kind], "b32", lambda a: bin(a).count("1"), [x])
    check(f"clz.{kind} {{d}}, {{0}};", [kind], "b32", lambda a: bits - a.bit_length(), [x])
    check(f"brev.{kind} {{d}}, {{0}};", [kind], kind, lambda a: int(f"{a:0{bits}b}"[::-1], 2), [x])


@pytest.mark.parametrize("source", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("to", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_conversions_between_integers(to, source):
    check(f"cvt.{to}.{source} {{d}}, {{0}};", [source], to, lambda a: a, [numbers(source)])


def test_halves_of_registers():
    x = numbers("b64")
    check("mov.b64 {{%r60, %r61}}, {0}; xor.b32 {d}, %r60, %r61;", ["b64"], "b32",
          lambda a: (a ^ a >> 32), [x])  # fmt: skip
    check("mov.b64 {{_, {d}}}, {0};", ["b64"], "b32", lambda a: a >> 32, [x])
    check("mov.b32 {{%rs60, %rs61}}, {0}; mov.b32 {d}, {{%rs61, %rs60}};", ["b32"], "b32",
          lambda a: a >> 16 | a << 16, [numbers("b32")])  # fmt: skip


def test_a_predicate_keeps_the_old_value():
    a, p = numbers("b32"), np.arange(COUNT, dtype=np.uint8) % 3 == 0
    got = evaluate(
        "mov.b32 {d}, 17; @{1} mov.b32 {d}, {0}; @!{1} add.s32 {d}, {d}, 4;", ["b32", "pred"], "b32",
        [a, p.astype(np.uint8)],
    )  # fmt: skip
    assert got.view(np.uint32).tolist() == np.where(p, a, 21).tolist()
