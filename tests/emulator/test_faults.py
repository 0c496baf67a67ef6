"""Faults planted in kernels are found, and their correct counterparts pass, in every order of the warps.

Each body is compiled: of every kind of fault one is quick.
"""

from contextlib import nullcontext

import pytest
import torch
from ptx_kit import run, thread_address

from tritonrec.harness.emulator import (
    BarrierError,
    Emulation,
    HangError,
    MisalignedError,
    OutsideError,
    RaceError,
    ScheduleError,
    UninitialisedError,
)

pytestmark = pytest.mark.if_changed

SEEDS = range(6)
BARRIER = "\tbar.sync 0;\n"
TID = "\tmov.u32 %r250, %tid.x;\n"


def zeros(count=256, dtype=torch.int32):
    return torch.zeros(count, dtype=dtype)


def each_seed(body, tensors, ends=nullcontext, **options):
    """Run in many orders, each of which `ends` so; tensors are as before at each."""
    before = [t.clone() for t in tensors]
    for seed in SEEDS:
        for tensor, content in zip(tensors, before, strict=True):
            tensor.copy_(content)
        with ends():
            run(body, tensors, settings=Emulation(seed=seed), **options)


def found_in_each_seed(error, match, *given, **options):
    each_seed(*given, **options, ends=lambda: pytest.raises(error, match=match))


# each thread writes its number to shared memory and reads that of its neighbour in the other warp
def exchange(between):
    return (
        TID
        + "\tshl.b32 %r1, %r250, 2;\n\txor.b32 %r2, %r1, 128;\n\tst.shared.b32 [%r1], %r250;\n"
        + between
        + "\tld.shared.b32 %r3, [%r2];\n"
        + thread_address("%rd0", 4)
        + "\tst.global.b32 [%rd200], %r3;\n"
    )


@pytest.mark.slow
def test_shared_memory_is_exchanged_behind_a_barrier():
    out = zeros(64)
    each_seed(exchange(BARRIER), [out], threads=64, shared=256)
    assert out.tolist() == [t ^ 32 for t in range(64)]


def test_shared_memory_exchanged_without_a_barrier_is_a_race():
    # the warp that comes first reads what nobody wrote, the one that comes second races
    found_in_each_seed(
        (RaceError, UninitialisedError), "shared memory", exchange(""), [zeros(64)], threads=64, shared=256
    )


def overwrite(between):
    """Both warps read word 0, then the first one writes it; behind `between`."""
    return (
        TID
        + "\tmov.b32 %r1, 0;\n\tmov.b32 %r4, 9;\n\tsetp.eq.s32 %p1, %r250, 0;\n"
        + "\t@%p1 st.shared.b32 [%r1], %r4;\n"
        + BARRIER
        + "\tld.shared.b32 %r3, [%r1];\n"
        + between
        + "\tmov.b32 %r4, 11;\n\t@%p1 st.shared.b32 [%r1], %r4;\n"
        + thread_address("%rd0", 4)
        + "\tst.global.b32 [%rd200], %r3;\n"
    )


def test_a_write_over_what_another_warp_reads_needs_a_barrier():
    found_in_each_seed(RaceError, "race", overwrite(""), [zeros(64)], threads=64, shared=16)
    out = zeros(64)
    each_seed(overwrite(BARRIER), [out], threads=64, shared=16)
    assert out.tolist() == [9] * 64


@pytest.mark.slow
def test_two_warps_may_store_the_same_value_but_not_two():
    same = (
        TID
        + "\tmov.b32 %r1, 0;\n\tmov.b32 %r2, 5;\n\tst.shared.b32 [%r1], %r2;\n\tld.shared.b32 %r3, [%r1];\n"
    )
    same += thread_address("%rd0", 4) + "\tst.global.b32 [%rd200], %r3;\n"
    each_seed(same, [zeros(64)], threads=64, shared=16)
    other = same.replace("mov.b32 %r2, 5", "shr.u32 %r2, %r250, 5")
    found_in_each_seed(
        RaceError, "writes of two values|read after", other, [zeros(64)], threads=64, shared=16
    )


@pytest.mark.slow
def test_lanes_of_a_warp_follow_each_other():
    body = TID + "\tshl.b32 %r1, %r250, 2;\n\txor.b32 %r2, %r1, 4;\n\tst.shared.b32 [%r1], %r250;\n"
    body += "\tld.shared.b32 %r3, [%r2];\n\tst.shared.b32 [%r1], %r3;\n"
    body += thread_address("%rd0", 4) + "\tst.global.b32 [%rd200], %r3;\n"
    out = zeros(64)
    each_seed(body, [out], threads=64, shared=256)
    assert out.tolist() == [t ^ 1 for t in range(64)]


def reads_then_writes(between):
    """Warps of a block: all read word 0 of memory, then thread 0 adds 1 to it."""
    return (
        TID
        + "\tld.global.b32 %r1, [%rd0];\n"
        + between
        + "\tadd.s32 %r2, %r1, 1;\n\tsetp.eq.s32 %p1, %r250, 0;\n\t@%p1 st.global.b32 [%rd0], %r2;\n"
        + thread_address("%rd1", 4)
        + "\tst.global.b32 [%rd200], %r1;\n"
    )


def test_global_memory_that_a_late_warp_reads_needs_a_barrier_before_the_store():
    found_in_each_seed(
        RaceError, r"t0\[0\]; the other access is of block \(0, 0, 0\), warp", reads_then_writes(""),
        [zeros(1), zeros(128)], threads=128,
    )  # fmt: skip
    memory, out = zeros(1), zeros(128)
    each_seed(reads_then_writes(BARRIER), [memory, out], threads=128)
    assert out.tolist() == [0] * 128 and memory.item() == 1


@pytest.mark.slow
def test_blocks_that_write_one_place_race_and_those_with_places_of_their_own_do_not():
    body = "\tmov.u32 %r1, %ctaid.x;\n" + thread_address("%rd0", 4) + "\tst.global.b32 [%rd200], %r1;\n"
    found_in_each_seed(RaceError, r"writes of two values of t0\[\d+\]", body, [zeros(32)], grid=3)
    own = "\tmov.u32 %r1, %ctaid.x;\n" + thread_address("%rd0", 4)
    own += (
        "\tmul.wide.u32 %rd60, %r1, 128;\n\tadd.s64 %rd200, %rd200, %rd60;\n\tst.global.b32 [%rd200], %r1;\n"
    )
    out = zeros(96)
    each_seed(own, [out], grid=3)
    assert out.tolist() == [0] * 32 + [1] * 32 + [2] * 32


def test_a_block_that_reads_what_another_wrote_races():
    body = """
\tmov.u32 %r1, %ctaid.x;
\tsetp.eq.s32 %p1, %r1, 0;
\tmov.b32 %r2, 7;
\t@%p1 st.global.b32 [%rd0], %r2;
\t@!%p1 ld.global.b32 %r3, [%rd0];
"""
    found_in_each_seed(RaceError, r"t0\[0\]", body, [zeros(1)], grid=2)
    each_seed(body, [zeros(1)], grid=2, races=(0,))  # declared
    each_seed(body.replace("0;\n\tmov", "9;\n\tmov"), [zeros(1)], grid=2)  # nobody stores


@pytest.mark.slow
def test_atomics_do_not_race_with_each_other_but_with_plain_loads():
    add = "\tmov.b32 %r1, 1;\n\tred.global.gpu.relaxed.add.u32 [%rd0], %r1;\n"
    total = zeros(1)
    each_seed(add, [total], threads=64, grid=3)
    assert total.item() == 192
    found_in_each_seed(
        RaceError, r"t0\[0\]", add + "\tld.global.b32 %r2, [%rd0];\n", [zeros(1)], threads=64, grid=3
    )


@pytest.mark.parametrize("place", [-1, 32])
def test_an_access_outside_of_a_tensor(place):
    memory = zeros(64)
    inner = memory[16:48]  # a view: its neighbours belong to somebody else
    for text in (
        "ld.global.b32 %r2, [%rd200]",
        "st.global.b32 [%rd200], %r1",
        "red.global.gpu.relaxed.add.u32 [%rd200], %r1",
    ):
        body = f"\tmov.b32 %r1, 1;\n\tadd.s64 %rd200, %rd0, {4 * place};\n\t{text};\n"
        with pytest.raises(
            OutsideError, match=rf"outside of every tensor, the nearest is t0\[{place}\] of 32"
        ):
            run(body, [inner])
        run(body.replace(str(4 * place), "124"), [inner], races=(0,))


@pytest.mark.slow
def test_an_access_outside_of_shared_memory():
    body = "\tmov.b32 %r1, {};\n\tst.shared.b32 [%r1], %r1;\n"
    with pytest.raises(OutsideError, match="4 bytes at 64 of 64 bytes of shared memory"):
        run(body.format(64), [zeros(1)], shared=64)
    run(body.format(60), [zeros(1)], shared=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "ld.global.v2.b32 {%r1, %r2}, [%rd0+4]",
        "st.global.b64 [%rd0+4], %rd60",
        "atom.global.relaxed.gpu.add.u64 %rd60, [%rd0+4], %rd60",
        "cp.async.ca.shared.global [%r4], [%rd0+4], 8",
        "ld.shared.b64 %rd60, [%r3]",
        "st.shared.b64 [%r3], %rd60",
        "atom.shared.add.u64 %rd60, [%r3], %rd60",
        "cp.async.ca.shared.global [%r3], [%rd0], 8",
    ],
)
def test_a_misaligned_access(text):
    body = f"\tmov.b32 %r3, 4;\n\tmov.b32 %r4, 0;\n\tmov.b64 %rd60, 0;\n\t{text};\n"
    with pytest.raises(MisalignedError, match="access of 8 bytes"):
        run(body, [zeros(8)], shared=64)
    written = "\tmov.b32 %r3, 0;\n\tmov.b32 %r4, 8;\n\tmov.b64 %rd60, 0;\n\tst.shared.b64 [%r3], %rd60;\n"
    run(f"{written}\t{text.replace('+4', '+8')};\n", [zeros(8)], shared=64)


def test_a_read_of_shared_memory_that_nobody_wrote():
    write = "\tmov.b32 %r1, 8;\n\tst.shared.b32 [%r1], %r1;\n"
    read = "\tld.shared.v2.b32 {%r2, %r3}, [%r1];\n"
    with pytest.raises(UninitialisedError, match="byte 12 of shared memory, which nobody wrote"):
        run(write + read, [zeros(1)], shared=64)
    run(write + "\tst.shared.b32 [%r1+4], %r1;\n" + read, [zeros(1)], shared=64)


@pytest.mark.slow
def test_shared_memory_of_the_block_before_is_no_initial_value():
    body = """
\tmov.u32 %r1, %ctaid.x;
\tsetp.ne.s32 %p1, %r1, 17;
\tmov.b32 %r2, 0;
\t@%p1 st.shared.b32 [%r2], %r1;
\tld.shared.b32 %r3, [%r2];
"""
    found_in_each_seed(UninitialisedError, r"block \(17, 0, 0\)", body, [zeros(1)], grid=40, shared=16)


@pytest.mark.slow
def test_a_copy_that_nobody_waited_for():
    def body(wait, barrier=BARRIER):
        return (
            thread_address("%rd0", 4)
            + "\tshl.b32 %r1, %r250, 2;\n\tcp.async.ca.shared.global [%r1], [%rd200], 4;\n"
            + "\tcp.async.commit_group;\n"
            + wait
            + barrier
            + "\txor.b32 %r2, %r1, 128;\n\tld.shared.b32 %r3, [%r2];\n"
            + thread_address("%rd1", 4)
            + "\tst.global.b32 [%rd200], %r3;\n"
        )

    source, out = torch.arange(64, dtype=torch.int32), zeros(64)
    options = {"threads": 64, "shared": 256}
    each_seed(body("\tcp.async.wait_group 0;\n"), [source, out], **options)
    assert out.tolist() == [t ^ 32 for t in range(64)]
    found_in_each_seed(RaceError, "read after a write", body(""), [source, out], **options)
    found_in_each_seed(
        RaceError, "read after a write", body("\tcp.async.wait_group 1;\n"), [source, out], **options
    )
    found_in_each_seed(
        (RaceError, UninitialisedError),
        "shared",
        body("\tcp.async.wait_group 0;\n", ""),
        [source, out],
        **options,
    )


def test_a_barrier_that_a_warp_leaves_out():
    body = TID + "\tsetp.ge.s32 %p1, %r250, 32;\n\t@%p1 bra $OUT;\n\tbar.sync 0;\n$OUT:\n\tmov.b32 %r1, 0;\n"
    found_in_each_seed(BarrierError, "warp 1 never reaches", body, [zeros(1)], threads=64)
    each_seed(body.replace("32;", "64;"), [zeros(1)], threads=64)


@pytest.mark.slow
def test_a_barrier_that_some_lanes_leave_out():
    body = TID + "\tsetp.ge.s32 %p1, %r250, 20;\n\t@%p1 bra $OUT;\n\tbar.sync 0;\n$OUT:\n\tmov.b32 %r1, 0;\n"
    found_in_each_seed(BarrierError, r"lanes 0x000fffff of the warp wait", body, [zeros(1)])


@pytest.mark.slow
def test_warps_at_two_barriers():
    body = (
        TID
        + """\tsetp.ge.s32 %p1, %r250, 32;
\t@%p1 bra $A;
\tbar.sync 0;
\tbra $OUT;
$A:
\tbar.sync 0;
$OUT:
\tmov.b32 %r1, 0;
"""
    )
    found_in_each_seed(BarrierError, "barrier, while other warps wait at", body, [zeros(1)], threads=64)


SPIN = """
\tmov.u32 %r1, %ctaid.x;
\tsetp.eq.s32 %p1, %r1, {setter};
\tmov.b32 %r2, 1;
\t@%p1 atom.global.relaxed.gpu.exch.b32 %r5, [%rd0], %r2;
\t@%p1 bra $OUT;
$LOOP:
\tatom.global.relaxed.gpu.add.u32 %r3, [%rd0], 0;
\tsetp.eq.s32 %p2, %r3, 0;
\t@%p2 bra $LOOP;
$OUT:
\tmov.b32 %r4, 0;
"""


@pytest.mark.slow
@pytest.mark.parametrize("setter", range(4))
def test_a_warp_that_waits_for_another_one_of_its_block_goes_on(setter):
    body = SPIN.format(setter=setter).replace(
        "mov.u32 %r1, %ctaid.x;", "mov.u32 %r1, %tid.x;\n\tshr.u32 %r1, %r1, 5;"
    )
    for seed in range(12):
        run(body, [zeros(1)], threads=128, settings=Emulation(seed=seed))


def test_a_wait_for_a_flag_that_nobody_sets_is_a_hang():
    for seed in SEEDS:
        with pytest.raises(HangError, match=r"no memory has changed for 20000 accesses.*(atom|setp|bra)"):
            run(SPIN.format(setter=9), [zeros(1)], grid=2, settings=Emulation(seed=seed, patience=20_000))


@pytest.mark.slow
def test_a_loop_without_end_and_without_memory_is_a_hang():
    body = "\tmov.b32 %r1, 0;\n$LOOP:\n\tadd.s32 %r1, %r1, 1;\n\tsetp.ge.s32 %p1, %r1, 0;\n\tbra $LOOP;\n"
    with pytest.raises(HangError):
        run(body, [zeros(1)], settings=Emulation(patience=20_000))


def test_results_that_depend_on_the_order_of_blocks():
    body = "\tmov.u32 %r1, %ctaid.x;\n\tatom.global.relaxed.gpu.exch.b32 %r2, [%rd0], %r1;\n"
    memory = zeros(1)
    found = 0
    for seed in range(8):
        try:
            run(body, [memory], threads=32, grid=4, settings=Emulation(seed=seed, schedules=4))
        except ScheduleError as error:
            assert "t0[0] differs between two orders" in str(error)
            found += 1
    assert found > 4
    for seed in range(8):
        run(body, [memory], threads=32, grid=4, settings=Emulation(seed=seed, schedules=4), varies=(0,))
    counted = "\tmov.u32 %r1, %ctaid.x;\n\tred.global.gpu.relaxed.add.u32 [%rd0], %r1;\n"
    for seed in range(8):
        memory.zero_()
        run(counted, [memory], threads=32, grid=4, settings=Emulation(seed=seed, schedules=4))
        assert memory.item() == 32 * 6  # each schedule begins with the memory of the launch


def test_a_fault_names_kernel_line_block_thread_and_element():
    body = (
        "\t.loc\t1 41 7\n\tmov.u32 %r1, %ctaid.x;\n"
        + thread_address("%rd0", 4)
        + "\tmul.wide.u32 %rd60, %r1, 40;\n\tadd.s64 %rd200, %rd200, %rd60;\n"
        + "\t.loc\t1 42 7\n\tst.global.b32 [%rd200], %r1;\n\t.loc\t1 43 7\n"
    )
    with pytest.raises(
        OutsideError, match=r"k at kernel.py:42, block \(1, 0, 0\), thread \d+: .*t0\[\d+\] of 32 el"
    ):
        run(body, [zeros(32)], grid=2, settings=Emulation(races=False))
