"""Kernels for `test_index_widths`: a line that ends in ``# at fault`` can leave 32 bits, and no other can."""

import json
import sys

import index_widths
import launches
import triton
import triton.language as tl


@triton.jit
def product_kernel(x_ptr, num_groups):
    place = num_groups * 9  # at fault
    tl.store(x_ptr + place, 0)


@triton.jit
def long_product_kernel(x_ptr, num_groups):
    place = num_groups * tl.full((), 9, tl.int64)
    tl.store(x_ptr + place, 0)


@triton.jit
def block_kernel(x_ptr, length, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # at fault
    tl.store(x_ptr + place, 0, mask=place < length)


@triton.jit
def long_block_kernel(x_ptr, length, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + place, 0, mask=place < length)


@triton.jit
def steps_kernel(x_ptr, length, BLOCK: tl.constexpr):
    for start in range(0, length, BLOCK):  # at fault
        tl.store(x_ptr + start, 0)
    for start in range(tl.full((), 0, tl.int64), length, BLOCK):
        tl.store(x_ptr + start + 1, 0)


@triton.jit
def carried_kernel(x_ptr, length):
    total = 0
    lane = 0
    for _ in range(length):
        total += 3  # at fault
        lane = tl.minimum(lane + 1, 7)
    tl.store(x_ptr + total, lane)


@triton.jit
def maybe_no_step_kernel(x_ptr, length):
    place = tl.program_id(0)
    for step in range(tl.load(x_ptr)):
        place = tl.minimum(step, 7).to(tl.int32)
    tl.store(x_ptr + place * 2, 0)  # at fault


@triton.jit
def searching_kernel(x_ptr, length):
    place = 0
    seen = tl.full((), 0, tl.int64)
    while (tl.load(x_ptr + place) != 0) & (seen < length):
        place += 2  # at fault
        seen += 1
    tl.store(x_ptr + place, seen)


@triton.jit
def converted_kernel(x_ptr, length):
    place = tl.load(x_ptr).to(tl.int32)  # at fault
    half = (tl.load(x_ptr + 1) & 0xFFFFFFFF).to(tl.int32)
    tl.store(x_ptr + place, half)


@triton.jit
def sum_kernel(x_ptr, length, BLOCK: tl.constexpr):
    few = tl.sum((tl.arange(0, BLOCK) < length).to(tl.int32), axis=0)
    many = tl.sum(tl.where(tl.arange(0, BLOCK) < length, length, 0), axis=0)  # at fault
    tl.store(x_ptr + few, many)


@triton.jit
def shifted_kernel(x_ptr, length):
    tl.store(x_ptr + (length << 1), 0)  # at fault
    tl.store(x_ptr + (length >> 1), 1)


@triton.jit
def branch_kernel(x_ptr, length):
    place = length
    if tl.load(x_ptr) > 0:
        place = length // 2
    tl.store(x_ptr + place * 2, 0)  # at fault


@triton.jit
def grouped_kernel(x_ptr, length, group):
    tl.store(x_ptr + length // group * group, 0)
    tl.store(x_ptr + (length // group + 1) * group, 0)  # at fault


@triton.jit
def add_one(x):
    return x + 1  # at fault


@triton.jit
def called_kernel(x_ptr, length):
    tl.store(x_ptr + add_one(length), 0)


@triton.jit
def masked_kernel(x_ptr, num_slots):
    slot = tl.load(x_ptr).to(tl.int64) & (num_slots - 1)
    tl.store(x_ptr + slot * 8 + tl.arange(0, 8), 0)


def main() -> None:
    found = {}
    for name, kernel in list(globals().items()):
        if not name.endswith("_kernel"):
            continue
        index = kernel.arg_names.index
        constants = {(index("BLOCK"),): 64} if "BLOCK" in kernel.arg_names else {}
        kinds = {"x_ptr": "*i64", "BLOCK": "constexpr"}
        signature = {each: kinds.get(each, "i32") for each in kernel.arg_names}
        launch = launches.Launch(kernel, name, signature, constants, (), {})
        found[name] = index_widths.check([launch])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
