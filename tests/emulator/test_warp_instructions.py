"""Instructions of a warp equal their definitions in the PTX ISA, computed lane by lane or as matrices."""

import numpy as np
import pytest
import torch
from ptx_kit import evaluate, run, thread_address

from tritonrec.harness.emulator import BarrierError, UnsupportedError

pytestmark = pytest.mark.slow  # compiles the emulator's runtime

LANES = np.arange(32)


def drawn(count=32, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


def shuffled(values, mode, b, c):
    """PTX ISA, "shfl.sync", for each lane."""
    out, inside = values.copy(), np.zeros(32, bool)
    for lane in range(32):
        distance, clamp, segment = int(b[lane]) & 31, c & 31, c >> 8 & 31
        most = (lane & segment) | (clamp & ~segment)
        least = lane & segment
        other = {
            "up": lane - distance,
            "down": lane + distance,
            "bfly": lane ^ distance,
            "idx": least | (distance & ~segment),
        }[mode]
        inside[lane] = other >= most if mode == "up" else other <= most
        if inside[lane]:
            out[lane] = values[other]
    return out, inside


@pytest.mark.parametrize("c", [31, 0, 0x1C1F & 0x1F1F, 0x181F, 0x1807])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode, c):
    values, b = drawn(), drawn(seed=1) % 32
    expected, inside = shuffled(values, mode, b, c)
    got = evaluate(f"shfl.sync.{mode}.b32 {{d}}, {{0}}, {{1}}, {c}, -1;", ["b32", "b32"], "b32", [values, b])
    assert got.view(np.uint32).tolist() == expected.tolist()
    found = evaluate(
        f"shfl.sync.{mode}.b32 %r60|{{d}}, {{0}}, {{1}}, {c}, -1;", ["b32", "b32"], "pred", [values, b]
    )
    assert found.astype(bool).tolist() == inside.tolist()


def test_every_warp_shuffles_by_itself():
    values = drawn(128)
    got = evaluate("shfl.sync.bfly.b32 {d}, {0}, 16, 31, -1;", ["b32"], "b32", [values])
    assert got.view(np.uint32).tolist() == values.reshape(4, 2, 16)[:, ::-1].ravel().tolist()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add.s32", sum),
        ("add.u32", sum),
        ("min.s32", min),
        ("max.s32", max),
        ("min.u32", min),
        ("max.u32", max),
    ],
)
def test_reductions_over_members(name, function):
    values = drawn()
    typed = values.view(np.int32) if name.endswith("s32") else values
    for members in (0xFFFFFFFF, 0xFFFFFFFF & ~0xF0):
        got = evaluate(f"redux.sync.{name} {{d}}, {{0}}, {members};", ["b32"], "b32", [values])
        chosen = [int(v) for lane, v in enumerate(typed) if members >> lane & 1]
        assert set(got.view(np.uint32).tolist()) == {function(chosen) & 0xFFFFFFFF}


@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_bitwise_reductions(name):
    values = drawn() | np.uint32(0x80000001) if name == "and" else drawn()
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name]
    got = evaluate(f"redux.sync.{name}.b32 {{d}}, {{0}}, -1;", ["b32"], "b32", [values])
    assert set(got.view(np.uint32).tolist()) == {int(function.reduce(values))}


def test_votes():
    for seed, density in enumerate((0.0, 0.4, 1.0)):
        p = (np.random.default_rng(seed).random(32) < density).astype(np.uint8)
        ballot = sum(int(bit) << lane for lane, bit in enumerate(p))
        got = evaluate("vote.sync.ballot.b32 {d}, {0}, -1;", ["pred"], "b32", [p])
        assert set(got.view(np.uint32).tolist()) == {ballot}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_matrices_in_shared_memory(number, transposed):
    """Lane l holds elements (l // 4, 2 (l % 4) + {0, 1}) of a matrix; row r of matrix m is lane 8m + r's."""
    matrices = np.random.default_rng(number).integers(0, 2**16, (4, 8, 8), dtype=np.uint16)
    order = np.random.default_rng(9).permutation(32)  # rows lie anywhere in shared memory
    memory = np.zeros((32, 8), np.uint16)
    memory[order] = matrices.reshape(32, 8)
    fill = torch.from_numpy(memory.view(np.int32).copy())
    places = torch.from_numpy((order * 16).astype(np.int32))
    out = torch.zeros(32, 4, dtype=torch.int32)
    registers = [f"%r{60 + i}" for i in range(number)]
    suffix = ".trans" if transposed else ""
    body = (
        thread_address("%rd0", 16)
        + "\tld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd200];\n\tshl.b32 %r14, %r250, 4;\n"
        + "\tst.shared.v4.b32 [%r14], {%r10, %r11, %r12, %r13};\n\tbar.sync 0;\n"
        + thread_address("%rd1", 4)
        + "\tld.global.b32 %r15, [%rd200];\n"
        + f"\tldmatrix.sync.aligned.m8n8.x{number}{suffix}.shared.b16 {{{', '.join(registers)}}}, [%r15];\n"
        + thread_address("%rd2", 16)
        + "".join(f"\tst.global.b32 [%rd200+{4 * i}], {r};\n" for i, r in enumerate(registers))
    )
    run(body, [fill, places, out], shared=512)
    got = out.numpy().view(np.uint16).reshape(32, 4, 2)
    for m in range(number):
        matrix = matrices[m].T if transposed else matrices[m]
        for lane in range(32):
            assert got[lane, m].tolist() == matrix[lane // 4, 2 * (lane % 4) :][:2].tolist()
    # and back
    back = torch.zeros(32, 4, dtype=torch.int32)
    body = (
        thread_address("%rd0", 16)
        + "".join(f"\tld.global.b32 {r}, [%rd200+{4 * i}];\n" for i, r in enumerate(registers))
        + thread_address("%rd1", 4)
        + "\tld.global.b32 %r15, [%rd200];\n"
        + "\tmov.b32 %r16, 0;\n\tshl.b32 %r14, %r250, 4;\n"
        + "\tst.shared.v4.b32 [%r14], {%r16, %r16, %r16, %r16};\n\tbar.sync 0;\n"
        + f"\tstmatrix.sync.aligned.m8n8.x{number}{suffix}.shared.b16 [%r15], {{{', '.join(registers)}}};\n"
        + "\tbar.sync 0;\n\tld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r14];\n"
        + thread_address("%rd2", 16)
        + "\tst.global.v4.b32 [%rd200], {%r10, %r11, %r12, %r13};\n"
    )
    run(body, [out, places, back], shared=512)
    stored = back.numpy().view(np.uint16).reshape(32, 8)[order].reshape(4, 8, 8)
    assert (stored[:number] == matrices[:number]).all()


HALVES = [("bf16", torch.bfloat16), ("f16", torch.float16)]


def check_mma(kind, fragments, expected):
    """What each lane gets of A B + C, whose `fragments` are four, two and four registers of it."""
    out = torch.zeros(32, 4)
    body = (
        thread_address("%rd0", 40)
        + "".join(f"\tld.global.b32 %r{60 + i}, [%rd200+{4 * i}];\n" for i in range(10))
        + f"\tmma.sync.aligned.{kind} {{%r80, %r81, %r82, %r83}}, "
        "{%r60, %r61, %r62, %r63}, {%r64, %r65}, {%r66, %r67, %r68, %r69};\n"
        + thread_address("%rd1", 16)
        + "\tst.global.v4.b32 [%rd200], {%r80, %r81, %r82, %r83};\n"
    )
    run(body, [fragments, out])
    for lane in range(32):
        for i in range(4):
            want = expected[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2].float()
            assert abs(out[lane, i] - want) <= 1.2e-7 * abs(want) + 1e-12


@pytest.mark.parametrize(("kind", "dtype"), HALVES)
def test_mma_is_a_product_of_matrices(kind, dtype):
    """Fragments as in the PTX ISA, "Matrix fragments for mma.m16n8k16"."""
    generator = torch.Generator().manual_seed(4)
    a = torch.randn(16, 16, generator=generator).to(dtype)
    b = torch.randn(16, 8, generator=generator).to(dtype)
    c = torch.randn(16, 8, generator=generator)
    fragments = torch.zeros(32, 10, dtype=torch.int32)
    for lane in range(32):
        group, quad = lane // 4, lane % 4
        halves = torch.empty(12, dtype=dtype)
        for i in range(8):
            row = group + 8 * (i % 4 // 2)
            halves[i] = a[row, 2 * quad + i % 2 + 8 * (i // 4)]
        for i in range(4):
            halves[8 + i] = b[2 * quad + i % 2 + 8 * (i // 2), group]
        fragments[lane, :6] = halves.view(torch.int32)
        fragments[lane, 6:] = torch.stack([c[group + 8 * (i // 2), 2 * quad + i % 2] for i in range(4)]).view(
            torch.int32
        )
    check_mma(f"m16n8k16.row.col.f32.{kind}.{kind}.f32", fragments, c.double() + a.double() @ b.double())


def swizzled(row, column, pitch):
    """Byte of 2-byte element (row, column) in a tile of rows of `pitch` bytes, swizzled by 16-byte chunks."""
    at = row * pitch + 2 * column
    return at ^ ((at >> 7 & {128: 7, 64: 3, 32: 1}[pitch]) << 4)


def cut(x):
    """A float32 as a matrix instruction reads it: 10 binary digits behind the point, the others cut off."""
    digits, exponent = np.frexp(x.numpy().astype(np.float64))
    return torch.from_numpy(np.ldexp(np.trunc(np.ldexp(digits, 11)), exponent - 11))


def test_mma_of_tf32_is_a_product_of_matrices_whose_lowest_bits_are_ignored():
    """Fragments as in the PTX ISA, "Matrix fragments for mma.m16n8k8", .tf32."""
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randn(16, 8, generator=generator), torch.randn(8, 8, generator=generator)
    c = torch.randn(16, 8, generator=generator)
    fragments = torch.zeros(32, 10)
    for lane in range(32):
        group, quad = lane // 4, lane % 4
        for i in range(4):
            fragments[lane, i] = a[group + 8 * (i % 2), quad + 4 * (i // 2)]
            fragments[lane, 6 + i] = c[group + 8 * (i // 2), 2 * quad + i % 2]
        for i in range(2):
            fragments[lane, 4 + i] = b[quad + 4 * i, group]
    check_mma("m16n8k8.row.col.f32.tf32.tf32.f32", fragments, c.double() + cut(a) @ cut(b))


def multiplied_by_a_warp_group(words, d, pitch, start_b, instruction, keep=True, fragments=None):
    """D (128, 4) of the threads after a wgmma `instruction`; `words` fill shared memory with its matrices.

    The instruction has descriptors in %rd60 and %rd61, `fragments` (128, 4) in %r60 to %r63 and D in %r80 to
    %r83, to which it adds where %p1, here `keep`, says so.
    """
    mode = {128: 1, 64: 2, 32: 3}[pitch]
    a_descriptor, b_descriptor = (start >> 4 | (8 * pitch >> 4) << 32 | mode << 62 for start in (0, start_b))
    out = torch.zeros(128, 4)
    fragments = torch.zeros(128, 4) if fragments is None else fragments
    body = (
        thread_address("%rd0", 4)
        + "\tshl.b32 %r14, %r250, 2;\n"
        + "".join(
            f"\tld.global.b32 %r10, [%rd200+{512 * i}];\n\tst.shared.b32 [%r14+{512 * i}], %r10;\n"
            for i in range(len(words) // 128)
        )
        + "\tbar.sync 0;\n"
        + thread_address("%rd1", 16)
        + "\tld.global.v4.b32 {%r80, %r81, %r82, %r83}, [%rd200];\n"
        + thread_address("%rd2", 16)
        + "\tld.global.v4.b32 {%r60, %r61, %r62, %r63}, [%rd200];\n"
        + f"\tmov.b64 %rd60, {a_descriptor};\n\tmov.b64 %rd61, {b_descriptor};\n"
        + f"\tsetp.ne.b32 %p1, {int(keep)}, 0;\n\twgmma.fence.sync.aligned;\n\t{instruction}\n"
        + "\twgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;\n"
        + thread_address("%rd3", 16)
        + "\tst.global.v4.b32 [%rd200], {%r80, %r81, %r82, %r83};\n"
    )
    run(body, [words, d, fragments, out], threads=128, shared=4 * len(words))
    return out


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("pitch", [128, 64, 32])
def test_wgmma_of_tf32_multiplies_matrices(pitch, in_registers):
    """D (64, 8) += A (64, 8) B (8, 8) with k running fastest; A in shared memory or in registers."""
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn(rows, 8, generator=generator) for rows in (64, 8))
    d = torch.randn(128, 4, generator=generator)
    start_b = 64 * pitch
    words = torch.zeros((start_b + 1024) // 4 // 128 * 128 + 128)
    for matrix, start in ((a, 0), (b, start_b)):
        for row in range(matrix.shape[0]):
            for k in range(8):  # a word is two elements of 2 bytes of the other test's tile
                words[(start + swizzled(row, 2 * k, pitch)) // 4] = matrix[row, k]
    fragments = torch.zeros(128, 4)
    for thread in range(128):
        for i in range(4):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i % 2)
            fragments[thread, i] = a[row, thread % 4 + 4 * (i // 2)]
    instruction = (
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%r80,%r81,%r82,%r83}, "
        + ("{%r60,%r61,%r62,%r63}" if in_registers else "%rd60")
        + ", %rd61, %p1, 1, 1;"
    )
    out = multiplied_by_a_warp_group(words, d, pitch, start_b, instruction, fragments=fragments)
    product = cut(a) @ cut(b).T
    for thread in range(128):
        for i in range(4):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2)
            want = product[row, 2 * (thread % 4) + i % 2] + d[thread, i].double()
            assert abs(out[thread, i] - want) <= 1.2e-7 * abs(want) + 1e-12


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), HALVES)
@pytest.mark.parametrize("pitch", [128, 64, 32])
def test_wgmma_multiplies_matrices_in_swizzled_shared_memory(pitch, kind, dtype, keep):
    """D (64, 8) += A (64, 16) B (16, 8), A and B both with k running fastest."""
    generator = torch.Generator().manual_seed(6)
    a, b = (torch.randn(rows, 16, generator=generator).to(dtype) for rows in (64, 8))
    d = torch.randn(128, 4, generator=generator)
    start_b = 64 * pitch
    size = start_b + 1024
    memory = torch.zeros(size // 2, dtype=dtype)
    for matrix, start in ((a, 0), (b, start_b)):
        for row in range(matrix.shape[0]):
            for k in range(16):
                memory[(start + swizzled(row, k, pitch)) // 2] = matrix[row, k]
    words = torch.cat([memory.view(torch.int32), torch.zeros(-(size // 4) % 128, dtype=torch.int32)])
    instruction = (
        f"wgmma.mma_async.sync.aligned.m64n8k16.f32.{kind}.{kind} {{%r80,%r81,%r82,%r83}}, "
        "%rd60, %rd61, %p1, 1, 1, 0, 0;"
    )
    out = multiplied_by_a_warp_group(words, d, pitch, start_b, instruction, keep)
    product = a.double() @ b.double().T
    for thread in range(128):
        for i in range(4):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2)
            want = product[row, 2 * (thread % 4) + i % 2] + (d[thread, i].double() if keep else 0)
            assert abs(out[thread, i] - want) <= 1.2e-7 * abs(want) + 1e-12


def test_lanes_that_part_meet_again():
    """Each lane loops as often as its number says; then they all shuffle."""
    out = torch.zeros(32, dtype=torch.int32)
    body = (
        """
\tmov.u32 %r1, %tid.x;
\tmov.b32 %r2, 0;
\tmov.b32 %r3, 0;
$LOOP:
\tsetp.ge.s32 %p1, %r2, %r1;
\t@%p1 bra $OUT;
\tadd.s32 %r3, %r3, %r2;
\tadd.s32 %r2, %r2, 1;
\tbra $LOOP;
$OUT:
\tshfl.sync.bfly.b32 %r4, %r3, 31, 31, -1;
"""
        + thread_address("%rd0", 4)
        + "\tst.global.b32 [%rd200], %r4;\n"
    )
    run(body, [out])
    assert out.tolist() == [n * (n - 1) // 2 for n in range(31, -1, -1)]


def test_lanes_that_pass_by_an_instruction_of_the_warp_are_found():
    body = """
\tmov.u32 %r1, %tid.x;
\tsetp.eq.s32 %p1, %r1, 5;
\t@%p1 bra $OUT;
\tshfl.sync.bfly.b32 %r4, %r1, 1, 31, -1;
$OUT:
\tmov.b32 %r5, 1;
"""
    with pytest.raises(BarrierError, match=r"thread 5.*shfl"):
        run(body, [torch.zeros(1)])


@pytest.mark.parametrize("text", ["add.sat.s32 %r1, %r2, %r3;", "bar.sync 1, 64;", "foo.b32 %r1, %r2;",
                                  "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;"])  # fmt: skip
def test_an_unknown_instruction_is_named(text):
    guarded = "\tmov.b32 %r2, 0;\n\tmov.b32 %r3, 0;\n\tsetp.eq.s32 %p1, %r2, 0;\n"
    text = f"@%p1 {text}" if text.startswith("shfl") else text
    with pytest.raises(UnsupportedError, match=text.split(",")[0].replace("%", ".").replace("@", ".")):
        run(guarded + f"\t{text}\n", [torch.zeros(1)])
