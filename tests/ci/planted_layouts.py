"""Kernels for `test_layouts`: sums whose order pointers decide (``orders``), and others (``fine``)."""

import json
import sys

import launches
import sum_layouts
import triton
import triton.language as tl

from tritonrec.kernels.triton_jit import jit_for_any_alignment


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
        if not name.startswith(("orders", "fine")):
            continue
        signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "length": "i32"}
        aligned = tuple((i,) for i in range(2) if not kernel.params[i].do_not_specialize_on_alignment)
        launch = launches.Launch(kernel, name, signature, {}, aligned, {"num_warps": 4})
        found[name] = sum_layouts.check([launch], sys.argv[1])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
