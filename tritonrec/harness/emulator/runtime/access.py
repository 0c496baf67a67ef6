"""Memory by its address, from numba: integers of 1, 2, 4 and 8 bytes as int64, and floats.

All integers are int64, because numba makes float64 of int64 and uint64.
"""
# mypy: ignore-errors

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tritonrec.kernels.caches import njit

from .. import layout


def _loader(bits):
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.load(pointer, align=1)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return types.int64(types.int64), codegen

    return load


def _storer(bits):
    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = arguments[1] if bits == 64 else builder.trunc(arguments[1], ir.IntType(bits))
            builder.store(value, pointer, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return store


load1, load2, load4, load8 = (_loader(bits) for bits in (8, 16, 32, 64))
store1, store2, store4, store8 = (_storer(bits) for bits in (8, 16, 32, 64))


def _bitcast(source, target, kind_of_source, kind_of_target):
    """Integers are int64 in numba and hold the bits in their low end."""

    @intrinsic
    def cast(typingctx, value):
        def codegen(context, builder, signature, arguments):
            value = arguments[0]
            if isinstance(source, ir.IntType) and source.width < 64:
                value = builder.trunc(value, source)
            value = builder.bitcast(value, target)
            if isinstance(target, ir.IntType) and target.width < 64:
                value = builder.zext(value, ir.IntType(64))
            return value

        return kind_of_target(kind_of_source), codegen

    return cast


float_of = _bitcast(ir.IntType(32), ir.FloatType(), types.int64, types.float32)
bits_of = _bitcast(ir.FloatType(), ir.IntType(32), types.float32, types.int64)
double_of = _bitcast(ir.IntType(64), ir.DoubleType(), types.int64, types.float64)
bits_of_double = _bitcast(ir.DoubleType(), ir.IntType(64), types.float64, types.int64)


@intrinsic
def resume(typingctx, program, warp):
    """Run a compiled program for one warp until it returns."""

    def codegen(context, builder, signature, arguments):
        int64 = ir.IntType(64)
        function = builder.inttoptr(arguments[0], ir.FunctionType(int64, [int64]).as_pointer())
        return builder.call(function, [arguments[1]])

    return types.int64(types.int64, types.int64), codegen


@njit(cache=True, inline="never")
def field(record, number):
    """A field of a launch, a block, a warp or a range."""
    return load8(record + 8 * number)


@njit(cache=True)
def put(record, number, value):
    store8(record + 8 * number, value)


@njit(cache=True)
def increase(record, number, value):
    store8(record + 8 * number, load8(record + 8 * number) + value)


@njit(cache=True)
def draw(launch, number_of_random):
    """The next of xorshift's numbers, 62 bits."""
    x = field(launch, number_of_random)
    x ^= x << 13
    x ^= (x >> 7) & ((1 << 57) - 1)
    x ^= x << 17
    put(launch, number_of_random, x)
    return (x >> 1) & ((1 << 62) - 1)


@njit(cache=True)
def spend(warp):
    """One unit of the warp's time; 1 when another warp is to run."""
    fuel = field(warp, layout.WARP_FUEL) - 1
    put(warp, layout.WARP_FUEL, fuel)
    return 1 if fuel <= 0 else 0


@njit(cache=True)
def fault(warp, kind, site, lane, address, size, cell, detail):
    """Note the first fault of a launch. `cell`: of the shadow, whose other user is to be named, or 0."""
    launch = field(warp, layout.WARP_LAUNCH)
    if field(launch, layout.FAULT_KIND) == 0:
        note_fault(launch, warp, kind, site, lane, address, size, cell, detail)
    return layout.FAULTED


@njit(cache=True)
def note_fault(launch, warp, kind, site, lane, address, size, cell, detail):
    # the fields in the order of `layout`: kind, site, pc, block, warp, lane, address, size, other, detail
    block = field(warp, 1)
    store8(launch + 8 * layout.FAULT_KIND, kind)
    store8(launch + 8 * layout.FAULT_SITE, site)
    store8(launch + 8 * (layout.FAULT_SITE + 1), field(warp, 5))
    store8(launch + 8 * (layout.FAULT_SITE + 2), field(block, 9))
    store8(launch + 8 * (layout.FAULT_SITE + 3), field(warp, 2))
    store8(launch + 8 * (layout.FAULT_SITE + 4), lane)
    store8(launch + 8 * (layout.FAULT_SITE + 5), address)
    store8(launch + 8 * (layout.FAULT_SITE + 6), size)
    if cell != 0:
        writes = detail != 2
        store8(launch + 8 * (layout.FAULT_SITE + 7), load4(cell if writes else cell + 12))
        store8(launch + 8 * (layout.FAULT_SITE + 8), load4(cell + 8 if writes else cell + 20))
    store8(launch + 8 * (layout.FAULT_SITE + 9), detail)
