"""Kernels for `test_layouts`: stores that may overtake loads, sums whose order pointers decide, and others.

What a kernel's name begins with is what has to be found: ``overtaken``, ``orders``, or ``fine``.
"""

import json
import sys

import in_place
import launches
import sum_layouts
import triton
import triton.language as tl

from tritonrec.kernels.triton_jit import jit_for_any_alignment


@triton.jit
def overtaken_few_elements(x_ptr, y_ptr, length):
    place = tl.arange(0, 32)  # of 128 threads, four load an element and one stores it
    tl.store(x_ptr + place, tl.load(x_ptr + place) + 1)


@triton.jit
def overtaken_two_layouts(x_ptr, y_ptr, length):
    row = tl.arange(0, 32)
    old = tl.load(x_ptr + row)
    tl.store(x_ptr + row, old + 1)
    tile = row[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(y_ptr + tile, old[:, None] * tl.load(y_ptr + tile))


@triton.jit
def overtaken_by_neighbours(x_ptr, y_ptr, length):
    place = tl.arange(0, 1024)
    tl.store(x_ptr + place, tl.load(x_ptr + place + 1))


@triton.jit
def overtaken_in_the_next_step(x_ptr, y_ptr, length):
    place = tl.arange(0, 32)
    total = tl.zeros((32,), tl.float32)
    for i in range(length):
        tl.store(x_ptr + place, total + i)
        total += tl.load(y_ptr + place)
        total += tl.load(x_ptr + place)


@triton.jit
def overtaken_with_a_barrier_on_one_way(x_ptr, y_ptr, length):
    place = tl.arange(0, 32)
    old = tl.load(x_ptr + place)
    if length > 5:
        tl.debug_barrier()
    tl.store(x_ptr + place, old + 1)


@triton.jit
def overtaken_scalar(x_ptr, y_ptr, length):
    tl.store(x_ptr, tl.load(x_ptr) + 1)


@triton.jit
def overtaken_behind_an_address(x_ptr, y_ptr, length):
    chunk = tl.load(y_ptr).to(tl.int64).to(tl.pointer_type(tl.float32))
    place = tl.arange(0, 32)
    tl.store(chunk + place, tl.load(chunk + place) + 1)


@triton.jit
def fine_behind_an_address(x_ptr, y_ptr, length):
    chunk = tl.load(y_ptr).to(tl.int64).to(tl.pointer_type(tl.float32))
    place = tl.arange(0, 32)
    tl.store(x_ptr + place, tl.load(chunk + place) + 1)


@triton.jit
def fine_with_a_barrier(x_ptr, y_ptr, length):
    place = tl.arange(0, 32)
    for i in range(length):
        old = tl.load(x_ptr + i * 32 + place)
        tl.debug_barrier()
        tl.store(x_ptr + i * 32 + place, old + 1)


@triton.jit
def fine_where_each_thread_has_its_own(x_ptr, y_ptr, length):
    place = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    value = tl.load(x_ptr + place, mask=place < length)
    tl.store(x_ptr + place, value * 2, mask=place < length)


@triton.jit
def fine_in_another_tensor(x_ptr, y_ptr, length):
    place = tl.arange(0, 32)
    tl.store(y_ptr + place, tl.load(x_ptr + place) + 1)


@triton.jit
def orders_by_alignment(x_ptr, y_ptr, length):
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, 1024)), axis=0))


@triton.jit
def orders_by_a_neighbour(x_ptr, y_ptr, length):
    place = tl.arange(0, 1024)
    x = tl.load(x_ptr + place * 3)
    tl.store(y_ptr + place, x - tl.sum(x, axis=0))


@jit_for_any_alignment
def fine_for_any_alignment(x_ptr, y_ptr, length):
    place = tl.arange(0, 1024)
    x = tl.load(x_ptr + place)
    tl.store(y_ptr + place, x - tl.sum(x, axis=0))


@triton.jit
def fine_sum_of_integers(x_ptr, y_ptr, length):
    x = tl.load(x_ptr + tl.arange(0, 1024)).to(tl.int32)
    tl.store(y_ptr, tl.sum(x, axis=0).to(tl.float32))


@triton.jit
def fine_greatest(x_ptr, y_ptr, length):
    tl.store(y_ptr, tl.max(tl.load(x_ptr + tl.arange(0, 1024)), axis=0))


def main() -> None:
    found = {}
    for name, kernel in list(globals().items()):
        if not name.startswith(("overtaken", "orders", "fine")):
            continue
        signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "length": "i32"}
        aligned = tuple((i,) for i in range(2) if not kernel.params[i].do_not_specialize_on_alignment)
        launch = launches.Launch(kernel, name, signature, {}, aligned, {"num_warps": 4})
        found[name] = {
            "overtaken": in_place.check([launch], sys.argv[1]),
            "orders": sum_layouts.check([launch], sys.argv[1]),
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
