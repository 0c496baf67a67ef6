# mypy: ignore-errors
"""Atomics, copies and waits on memory that processes share, by address, as LLVM IR.

numba has no atomics for the CPU. All of these are sequentially consistent: what a process wrote before an
atomic is seen by a process that has seen the atomic. An address is an int64; words are int64 and aligned,
those of `atomic_exchange32` int32. Waits are Linux's futex(2), by its number on this machine.
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

INT32, INT64 = ir.IntType(32), ir.IntType(64)
FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(platform.machine(), 0)
"""Number of the system call futex on this machine; 0 where it is not known."""


def _pointer(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def atomic_load(typingctx, address):
    """The int64 at `address`."""

    def codegen(context, builder, signature, arguments):
        return builder.load_atomic(_pointer(builder, arguments[0], INT64), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx, address, value):
    """Write the int64 `value` to `address`."""

    def codegen(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0], INT64), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typingctx, address, value):
    """Add to the int64 at `address`; return its earlier value."""

    def codegen(context, builder, signature, arguments):
        return builder.atomic_rmw("add", _pointer(builder, arguments[0], INT64), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_exchange32(typingctx, address, value):
    """Write the int32 `value` to `address`; return the earlier value."""

    def codegen(context, builder, signature, arguments):
        return builder.atomic_rmw("xchg", _pointer(builder, arguments[0], INT32), arguments[1], "seq_cst")

    return types.int32(types.int64, types.int32), codegen


@intrinsic
def copy_bytes(typingctx, to, source, count):
    """memcpy of `count` bytes between two addresses whose ranges do not overlap."""

    def codegen(context, builder, signature, arguments):
        to, source, count = arguments
        byte = ir.IntType(8)
        cgutils.raw_memcpy(builder, _pointer(builder, to, byte), _pointer(builder, source, byte), count, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def system_call(typingctx, number, first, second, third, fourth):
    """syscall(2) with four arguments; -1 after an error."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(INT64, [INT64], var_arg=True)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "syscall"), arguments)

    return types.int64(*[types.int64] * 5), codegen


@intrinsic
def give_way(typingctx):
    """sched_yield(2): let another process have the core."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(INT32, [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])

    return types.int32(), codegen


@intrinsic
def now(typingctx, scratch):
    """Nanoseconds of the monotonic clock; the 16 bytes at `scratch` are overwritten."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(INT32, [INT32, INT64])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, [INT32(1), arguments[0]])
        at = _pointer(builder, arguments[0], INT64)
        seconds, rest = (builder.load(builder.gep(at, [INT64(word)])) for word in (0, 1))
        return builder.add(builder.mul(seconds, INT64(10**9)), rest)

    return types.int64(types.int64), codegen
