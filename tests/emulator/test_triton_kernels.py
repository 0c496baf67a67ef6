"""Small Triton kernels on the emulated GPU; `test_plugin.py` runs this file with ``--emulate``."""

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from tritonrec.harness.emulator import (
    BarrierError,
    EmulationError,
    OutsideError,
    RaceError,
    ScheduleError,
    UninitialisedError,
)
from tritonrec.harness.emulator.driver import current
from tritonrec.kernels import dispatch
from tritonrec.kernels.address_table import addresses
from tritonrec.kernels.races import declared

pytestmark = pytest.mark.skipif(dispatch.emulated is None, reason="needs pytest --emulate")


class Shape(NamedTuple):
    values_ptr: torch.Tensor
    size: int
    nothing: None


@triton.jit
def add_kernel(shape, y_ptr, scale, flag, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(shape.values_ptr + place, mask=place < shape.size, other=0.0)
    if shape.nothing is None:
        x = x * scale
    if flag:
        x = -x
    tl.store(y_ptr + place, x, mask=place < shape.size)


@pytest.mark.parametrize("size", [1, 16, 63, 1000])
@pytest.mark.parametrize("flag", [True, False])
def test_named_tuples_none_floats_and_flags(size, flag):
    x, y = torch.randn(size), torch.full((size,), float("nan"))
    add_kernel[(triton.cdiv(size, 64),)](Shape(x, size, None), y, 1.75, flag, BLOCK=64)
    assert torch.equal(y, (-x if flag else x) * 1.75)


@triton.jit
def widths_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < size, other=1)
    tl.store(y_ptr + place, (x + x).to(y_ptr.dtype.element_ty), mask=place < size)


@pytest.mark.parametrize("skipped", [0, 1, 3])
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
              torch.float32, torch.float64],
)  # fmt: skip
def test_every_width_at_every_alignment(dtype, skipped):
    whole = torch.randint(-50, 50, (200 + skipped,)).to(dtype)
    x, out = whole[skipped:], torch.zeros(200 + skipped, dtype=dtype)
    widths_kernel[(1,)](x, out[skipped:], 200, BLOCK=256, num_warps=2)
    assert torch.equal(out[skipped:], x + x)
    assert out[:skipped].eq(0).all()


@triton.jit
def rows_kernel(x_ptr, sum_ptr, largest_ptr, running_ptr, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=0)
    tl.store(sum_ptr + row, tl.sum(x, axis=0))
    tl.store(largest_ptr + row, tl.max(x, axis=0))
    tl.store(running_ptr + row * columns + column, tl.cumsum(x, axis=0), mask=column < columns)


@pytest.mark.parametrize("warps", [1, 2, 4, 8])
def test_reductions_and_scans(warps):
    x = torch.randint(-100, 100, (5, 200))
    total, largest, running = (torch.empty(shape, dtype=torch.int64) for shape in (5, 5, (5, 200)))
    rows_kernel[(5,)](x, total, largest, running, 200, BLOCK=256, num_warps=warps)
    assert torch.equal(total, x.sum(1)) and torch.equal(largest, x.amax(1).clamp(min=0))
    assert torch.equal(running, x.cumsum(1))


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, inner, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr = "ieee",
):  # fmt: skip
    row, column, term = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, inner, K):
        a = tl.load(a_ptr + row[:, None] * inner + start + term[None, :])
        b = tl.load(b_ptr + (start + term)[:, None] * N + column[None, :])
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(c_ptr + row[:, None] * N + column[None, :], total)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("sizes", [(64, 32, 32), (128, 64, 64), (16, 16, 16), (64, 256, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_of_matrices(dtype, sizes, stages):
    m, n, k = sizes
    a, b, c = (
        torch.randn(m, 4 * k).to(dtype),
        torch.randn(4 * k, n).to(dtype),
        torch.full((m, n), float("nan")),
    )
    product_kernel[(1,)](a, b, c, 4 * k, M=m, N=n, K=k, num_stages=stages)
    exact = a.double() @ b.double()
    assert (c - exact).abs().max() <= 1e-6 * (a.double().abs() @ b.double().abs()).max()


@pytest.mark.parametrize("sizes", [(64, 32, 32), (128, 64, 64), (32, 32, 32)])
@pytest.mark.parametrize(("precision", "error"), [("tf32", 2.0**-10), ("tf32x3", 2.0**-21)])
def test_products_of_tf32(precision, error, sizes):
    m, n, k = sizes
    a, b, c = torch.randn(m, 4 * k), torch.randn(4 * k, n), torch.full((m, n), float("nan"))
    product_kernel[(1,)](a, b, c, 4 * k, M=m, N=n, K=k, PRECISION=precision)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    worst = ((c - exact).abs() / size).max()
    assert error / 100 < worst <= error


@triton.jit
def histogram_kernel(x_ptr, counts_ptr, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < size, other=0)
    tl.atomic_add(counts_ptr + x, 1, mask=place < size)


def test_atomics():
    x, counts = torch.randint(0, 10, (700,)), torch.zeros(10, dtype=torch.int32)
    histogram_kernel[(6,)](x, counts, 700, BLOCK=128)
    assert counts.tolist() == torch.bincount(x, minlength=10).tolist()


@triton.jit
def collatz_kernel(x_ptr, steps_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place)
    steps = tl.zeros((BLOCK,), tl.int32)
    while tl.max((x != 1).to(tl.int32), axis=0) > 0:
        steps += (x != 1).to(tl.int32)
        x = tl.where(x == 1, 1, tl.where(x % 2 == 0, x // 2, 3 * x + 1))
    tl.store(steps_ptr + place, steps)


def test_loops_that_depend_on_data():
    x, steps = torch.arange(1, 129), torch.zeros(128, dtype=torch.int32)
    collatz_kernel[(1,)](x, steps, BLOCK=128)

    def count(n):
        return 0 if n == 1 else 1 + count(n // 2 if n % 2 == 0 else 3 * n + 1)

    assert steps.tolist() == [count(n) for n in range(1, 129)]


@triton.jit
def late_warp_kernel(state_ptr, out_ptr, FIXED: tl.constexpr, BLOCK: tl.constexpr):
    """The block's threads all read the state; a warp that is late reads it behind the store."""
    place = tl.arange(0, BLOCK)
    state = tl.load(state_ptr + place % 4)
    if FIXED:
        tl.debug_barrier()
    tl.store(state_ptr + place % 4, state + 1.0)
    tl.store(out_ptr + place, state)


def test_a_planted_race_is_found_and_its_mended_form_is_not():
    with pytest.raises(RaceError, match=r"late_warp_kernel at test_triton_kernels.py:\d+.*state_ptr\[\d\]"):
        late_warp_kernel[(1,)](torch.zeros(4), torch.zeros(128), FIXED=False, BLOCK=128)
    state, out = torch.zeros(4), torch.empty(128)
    late_warp_kernel[(1,)](state, out, FIXED=True, BLOCK=128)
    assert state.eq(1).all() and out.eq(0).all()


@triton.jit
def neighbours_kernel(x_ptr, length):
    place = tl.arange(0, 1024)
    tl.store(x_ptr + place, tl.load(x_ptr + place + 1))


@triton.jit
def next_step_kernel(x_ptr, length):
    place = tl.arange(0, 32)
    total = tl.zeros((32,), tl.float32)
    for i in range(length):
        tl.store(x_ptr + place, total + i)
        total += tl.load(x_ptr + place)


@triton.jit
def barrier_on_one_way_kernel(x_ptr, length):
    """Of 128 threads four load an element, and one of them stores it."""
    place = tl.arange(0, 32)
    old = tl.load(x_ptr + place)
    if length > 5:
        tl.debug_barrier()
    tl.store(x_ptr + place, old + 1)


@pytest.mark.parametrize("kernel", [neighbours_kernel, next_step_kernel, barrier_on_one_way_kernel])
def test_a_store_that_overtakes_the_load_of_another_thread_is_a_race(kernel):
    with pytest.raises(RaceError, match=r"x_ptr\[\d+\]"):
        kernel[(1,)](torch.randn(1025), 4)


@triton.jit
def unmasked_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(y_ptr + place, tl.load(x_ptr + place))


def test_a_forgotten_mask_is_an_access_outside():
    with pytest.raises(
        OutsideError, match=r"unmasked_kernel at test_triton_kernels.py:\d+.*x_ptr\[\d+\] of 100"
    ):
        unmasked_kernel[(1,)](torch.zeros(100), torch.zeros(128), BLOCK=128)
    unmasked_kernel[(1,)](torch.zeros(128), torch.zeros(128), BLOCK=128)


@triton.jit
def behind_table_kernel(table_ptr, out_ptr, size, chunk_size, BLOCK: tl.constexpr):
    """Adds one to each value of the chunks, and stores it."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(table_ptr + place // chunk_size, mask=place < size, other=0)
    value = start.to(tl.pointer_type(tl.float32)) + place % chunk_size
    old = tl.load(value, mask=place < size)
    tl.store(value, old + 1, mask=place < size)
    tl.store(out_ptr + place, old, mask=place < size)


def chunks_of(*sizes):
    chunks = [torch.zeros(size) for size in sizes]
    return chunks, addresses(chunks, torch.device("cpu"))


def test_chunks_behind_a_table_of_addresses_are_arguments_in_every_schedule():
    chunks, table = chunks_of(100, 100, 100)
    before = torch.full((300,), float("nan"))
    behind_table_kernel[(3,)](table, before, 300, 100, BLOCK=128)
    assert before.eq(0).all() and all(chunk.eq(1).all() for chunk in chunks)


def test_a_place_behind_a_chunk_is_outside():
    _, table = chunks_of(100, 90, 100)
    with pytest.raises(
        OutsideError, match=r"behind_table_kernel.*nearest is table\[1\]\[9\d\] of 90 elements"
    ):
        behind_table_kernel[(3,)](table, torch.zeros(300), 300, 100, BLOCK=128)


def test_memory_that_no_table_leads_to_is_outside():
    chunks, table = chunks_of(100, 100, 100)
    with pytest.raises(OutsideError, match="outside of every tensor"):
        behind_table_kernel[(3,)](table.clone(), torch.zeros(300), 300, 100, BLOCK=128)
    assert all(chunk.eq(0).all() for chunk in chunks)


def test_a_race_behind_a_table_names_the_chunk():
    chunk = torch.zeros(100)
    table = addresses([chunk, chunk], torch.device("cpu"))
    with pytest.raises(RaceError, match=r"race, .* of table\[0\]\[\d+\]"):
        behind_table_kernel[(2,)](table, torch.zeros(200), 200, 100, BLOCK=128)


def test_a_chunk_that_nobody_wrote_is_not_read():
    if not current().settings.uninitialised:
        pytest.skip("switched off by --emulate-no-uninitialised")
    table = addresses([torch.zeros(100), torch.empty(100)], torch.device("cpu"))
    with pytest.raises(UninitialisedError, match=r"table\[1\]\[\d+\], which nobody wrote"):
        behind_table_kernel[(2,)](table, torch.zeros(200), 200, 100, BLOCK=128)


@triton.jit
def ticket_kernel(counter_ptr, ticket_ptr):
    tl.store(ticket_ptr + tl.program_id(0), tl.atomic_add(counter_ptr, 1))


declared_ticket_kernel = declared(varies=("ticket_ptr",))(triton.jit(ticket_kernel.fn))


def test_order_dependent_results_differ_unless_they_are_declared():
    if current().settings.schedules < 3:
        pytest.skip("needs --emulate-schedules 3")
    with pytest.raises(ScheduleError, match="ticket_ptr"):
        for _ in range(8):
            ticket_kernel[(16,)](torch.zeros(1, dtype=torch.int32), torch.zeros(16, dtype=torch.int32))
    for _ in range(8):
        tickets = torch.zeros(16, dtype=torch.int32)
        declared_ticket_kernel[(16,)](torch.zeros(1, dtype=torch.int32), tickets)
        assert sorted(tickets.tolist()) == list(range(16))


def test_a_declaration_names_arguments():
    with pytest.raises(ValueError, match="no arguments named"):
        declared(races=("other_ptr",))(ticket_kernel)


def test_memory_of_torch_empty_is_no_argument_to_read():
    if not current().settings.uninitialised:
        pytest.skip("switched off by --emulate-no-uninitialised")
    with pytest.raises(UninitialisedError, match=r"x_ptr\[\d+\], which nobody wrote"):
        unmasked_kernel[(1,)](torch.empty(128), torch.zeros(128), BLOCK=128)
    halves = torch.empty(128, dtype=torch.bfloat16)
    halves[:4], halves[6:] = 1, 1
    with pytest.raises(UninitialisedError, match=r"x_ptr\[[45]\], which nobody wrote"):
        unmasked_kernel[(1,)](halves, torch.zeros(128, dtype=torch.bfloat16), BLOCK=128)
    x = torch.empty(128)
    unmasked_kernel[(1,)](torch.ones(128), x, BLOCK=128)
    unmasked_kernel[(1,)](x, torch.empty_like(x), BLOCK=128)
    unmasked_kernel[(1,)](x.new_empty(128).fill_(3), x, BLOCK=128)


def test_launches_are_counted():
    rows = current().rows
    before = rows["kernels.unmasked_kernel"].launches if "kernels.unmasked_kernel" in rows else 0
    unmasked_kernel[(1,)](torch.zeros(128), torch.zeros(128), BLOCK=128)
    row = next(row for name, row in rows.items() if name.endswith("unmasked_kernel"))
    assert row.launches > before and row.counts.bytes_read >= 512 and row.counts.instructions > 0


def test_every_fault_is_an_emulation_error():
    for kind in (BarrierError, OutsideError, RaceError, ScheduleError, UninitialisedError):
        assert issubclass(kind, EmulationError)
