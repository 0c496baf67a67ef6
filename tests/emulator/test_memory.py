"""Loads, stores, atomics and asynchronous copies move the right bytes, in any order of the lanes."""

import numpy as np
import pytest
import torch
from ptx_kit import run, thread_address

from tritonrec.harness.emulator import Emulation

pytestmark = pytest.mark.slow  # compiles the emulator's runtime

SEEDS = range(4)


def words(count, seed=0):
    return torch.randint(
        -(2**31), 2**31, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize(
    ("kind", "count"),
    [("b8", 1), ("b8", 2), ("b16", 1), ("b16", 2), ("b16", 4), ("b32", 1), ("b32", 2), ("b32", 4), ("b64", 1),
     ("b64", 2)],
)  # fmt: skip
@pytest.mark.parametrize("space", ["global", "shared"])
def test_vectors_of_every_width(space, kind, count):
    size = int(kind[1:]) // 8 * count
    source = torch.randint(
        0, 256, (64 * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)
    )
    out = torch.zeros_like(source)
    prefix = {"b8": "%rs", "b16": "%rs", "b32": "%r", "b64": "%rd"}[kind]
    registers = [f"{prefix}{60 + i}" for i in range(count)]
    vector = f".v{count}" if count > 1 else ""
    group = "{" + ", ".join(registers) + "}" if count > 1 else registers[0]
    body = thread_address("%rd0", size) + f"\tld.global{vector}.{kind} {group}, [%rd200];\n"
    if space == "shared":  # the other warp's, back to front
        body += f"""
\tmul.lo.s32 %r20, %r250, {size};
\tst.shared{vector}.{kind} [%r20], {group};
\tbar.sync 0;
\tsub.s32 %r21, 63, %r250;
\tmul.lo.s32 %r20, %r21, {size};
\tld.shared{vector}.{kind} {group}, [%r20];
"""
    body += thread_address("%rd1", size) + f"\tst.global{vector}.{kind} [%rd200], {group};\n"
    counts = run(body, [source, out], threads=64, shared=64 * size)
    expected = source.view(64, size)
    assert torch.equal(out.view(64, size), expected.flip(0) if space == "shared" else expected)
    assert (counts.bytes_read, counts.bytes_written) == (64 * size, 64 * size)


def test_a_load_fills_a_wider_register():
    source, out = (
        torch.tensor([-3, 5, -(2**31), 7] * 8, dtype=torch.int32),
        torch.zeros(32, dtype=torch.int64),
    )
    for kind, expected in (("s32", source.long()), ("b32", source.long() & 0xFFFFFFFF)):
        body = thread_address("%rd0", 4) + f"\tld.global.{kind} %rd60, [%rd200];\n"
        run(body + thread_address("%rd1", 8) + "\tst.global.b64 [%rd200], %rd60;\n", [source, out])
        assert torch.equal(out, expected)


def test_lanes_whose_predicate_is_false_keep_their_registers_and_memory():
    source, out = words(32), torch.full((32,), 9, dtype=torch.int32)
    body = (
        thread_address("%rd0", 4)
        + "\tand.b32 %r10, %r250, 1;\n\tsetp.eq.s32 %p1, %r10, 0;\n\tmov.b32 %r60, 77;\n"
        + "\t@%p1 ld.global.b32 %r60, [%rd200];\n"
        + thread_address("%rd1", 4)
        + "\tsetp.lt.s32 %p2, %r250, 20;\n\t@%p2 st.global.b32 [%rd200], %r60;\n"
    )
    run(body, [source, out])
    even = torch.arange(32) % 2 == 0
    expected = torch.where(even, source, 77)
    assert torch.equal(out, torch.where(torch.arange(32) < 20, expected, 9))


ATOMICS = {
    "add.u32": (torch.int32, lambda x: x.sum()), "add.u64": (torch.int64, lambda x: x.sum()),
    "min.s32": (torch.int32, lambda x: x.min()), "max.s32": (torch.int32, lambda x: x.max()),
    "min.s64": (torch.int64, lambda x: x.min()), "max.s64": (torch.int64, lambda x: x.max()),
    "min.u32": (torch.int32, lambda x: (x.long() & 0xFFFFFFFF).min()),
    "max.u64": (torch.int64, lambda x: torch.tensor(max(int(v) & 2**64 - 1 for v in x) - 2**64)),
    "or.b32": (torch.int32, lambda x: torch.tensor(np.bitwise_or.reduce(x.numpy()))),
    "xor.b64": (torch.int64, lambda x: torch.tensor(np.bitwise_xor.reduce(x.numpy()))),
    "and.b32": (torch.int32, lambda x: torch.tensor(np.bitwise_and.reduce(x.numpy()))),
    "add.f32": (torch.float32, lambda x: x.sum()), "add.f64": (torch.float64, lambda x: x.sum()),
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_of_all_threads_on_one_place(name, seed):
    dtype, function = ATOMICS[name]
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:  # small whole numbers, whose sum is exact in any order
        values = torch.randint(-99, 99, (256,), generator=generator).to(dtype)
    else:
        info = torch.iinfo(dtype)
        values = torch.randint(info.min, info.max, (256,), dtype=dtype, generator=generator)
    place = values[:1].clone()
    size = values.element_size()
    register = "%r60" if size == 4 else "%rd60"
    body = "\tmov.u32 %r249, %ctaid.x;\n" + thread_address("%rd0", size)
    body += f"\tmul.wide.u32 %rd201, %r249, {128 * size};\n\tadd.s64 %rd200, %rd200, %rd201;\n"
    body += f"\tld.global.b{8 * size} {register}, [%rd200];\n"
    body += "\tsetp.eq.s32 %p1, %r250, 0;\n\tsetp.eq.s32 %p2, %r249, 0;\n\tand.pred %p1, %p1, %p2;\n"
    body += f"\t@!%p1 red.global.gpu.relaxed.{name} [%rd1], {register};\n"
    run(body, [values, place], threads=128, grid=2, settings=Emulation(seed=seed))
    assert place.item() == function(values).to(dtype).item()


@pytest.mark.parametrize("seed", SEEDS)
def test_an_atomic_returns_the_value_before_it(seed):
    place, old = torch.zeros(1, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    body = "\tatom.global.relaxed.gpu.add.u32 %r60, [%rd0], 3;\n"
    body += thread_address("%rd1", 4) + "\tst.global.b32 [%rd200], %r60;\n"
    run(body, [place, old], threads=128, settings=Emulation(seed=seed))
    assert place.item() == 3 * 128
    assert sorted(old.tolist()) == list(range(0, 3 * 128, 3))


def test_the_order_of_lanes_depends_on_the_seed():
    orders = set()
    for seed in range(6):
        place, old = torch.zeros(1, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
        body = "\tatom.global.relaxed.gpu.add.u32 %r60, [%rd0], 1;\n"
        run(body + thread_address("%rd1", 4) + "\tst.global.b32 [%rd200], %r60;\n", [place, old],
            settings=Emulation(seed=seed))  # fmt: skip
        orders.add(tuple(old.tolist()))
    assert len(orders) > 3


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_compare_and_swap_has_one_winner(kind):
    size = int(kind[1:]) // 8
    dtype = torch.int32 if size == 4 else torch.int64
    place, old = torch.full((8,), -1, dtype=dtype), torch.zeros(64, dtype=dtype)
    r = "%r" if size == 4 else "%rd"
    body = (
        "\tmov.u32 %r250, %tid.x;\n\tand.b32 %r10, %r250, 7;\n"
        + f"\tmul.wide.u32 %rd100, %r10, {size};\n\tadd.s64 %rd100, %rd100, %rd0;\n"
        + ("\tmov.b32 %r61, %r250;\n" if size == 4 else "\tcvt.u64.u32 %rd61, %r250;\n")
        + f"\tatom.global.acq_rel.gpu.cas.{kind} {r}60, [%rd100], -1, {r}61;\n"
        + thread_address("%rd1", size)
        + f"\tst.global.{kind} [%rd200], {r}60;\n"
    )
    run(body, [place, old], threads=64)
    for slot in range(8):
        threads = range(slot, 64, 8)
        winners = [t for t in threads if old[t] == -1]
        assert len(winners) == 1
        assert place[slot] == winners[0]
        assert all(old[t] == winners[0] for t in threads if t not in winners)


def test_vector_atomics():
    place = torch.arange(4, dtype=torch.float32)
    body = "\tmov.u32 %r250, %tid.x;\n\tcvt.rn.f32.u32 %r60, %r250;\n\tmov.b32 %r61, 0f3F800000;\n"
    body += "\tred.global.gpu.relaxed.add.v4.f32 [%rd0], {%r60, %r61, %r61, %r60};\n"
    run(body, [place])
    assert place.tolist() == [496, 33, 34, 499]


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("seed", SEEDS)
def test_asynchronous_copies_have_landed_behind_the_wait(size, seed):
    source, out = words(64 * size // 4), torch.zeros(64 * size // 4, dtype=torch.int32)
    move = {4: ("b32", "%r60"), 8: ("b64", "%rd60"), 16: ("v4.b32", "{%r60, %r61, %r62, %r63}")}[size]
    level = "cg" if size == 16 else "ca"
    body = (
        thread_address("%rd0", size)
        + f"""
\tmul.lo.s32 %r20, %r250, {size};
\tsetp.lt.s32 %p1, %r250, 50;
\tselp.b32 %r21, {size}, 0, %p1;
\tcp.async.{level}.shared.global [ %r20 + 0 ], [ %rd200 + 0 ], {size}, %r21;
\tcp.async.commit_group;
\tcp.async.wait_group 0;
\tbar.sync 0;
\tsub.s32 %r22, 63, %r250;
\tmul.lo.s32 %r20, %r22, {size};
\tld.shared.{move[0]} {move[1]}, [%r20];
"""
        + thread_address("%rd1", size)
        + f"\tst.global.{move[0]} [%rd200], {move[1]};\n"
    )
    run(body, [source, out], threads=64, shared=64 * size, settings=Emulation(seed=seed))
    expected = source.view(64, -1).clone()
    expected[50:] = 0  # a source of 0 bytes fills with zeros
    assert torch.equal(out.view(64, -1), expected.flip(0))


def test_predicated_atomics_keep_the_register():
    place, old = torch.zeros(1, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    body = "\tmov.u32 %r250, %tid.x;\n\tmov.b32 %r60, 500;\n\tsetp.lt.s32 %p1, %r250, 3;\n"
    body += "\t@%p1 atom.global.relaxed.gpu.add.u32 %r60, [%rd0], 1;\n"
    run(body + thread_address("%rd1", 4) + "\tst.global.b32 [%rd200], %r60;\n", [place, old])
    assert sorted(old[:3].tolist()) == [0, 1, 2]
    assert old[3:].tolist() == [500] * 29
