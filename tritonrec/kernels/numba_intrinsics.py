# mypy: ignore-errors
"""Instructions numba has no name for, written as LLVM IR so that every CPU gets its own lowering.

A kernel that visits a large table at random waits for memory and for mispredicted branches. Asking for a
block of cache lines first (`prefetch`) hides the one, comparing a whole line at once (`equal_mask4`,
`equal_mask8`, `negative_mask8`) avoids the other. `copy` moves a row as memcpy does.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _element_pointer(context, builder, array_type, array, index):
    struct = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, struct, [index])


@intrinsic
def prefetch(typingctx, array, index):
    """Ask for the cache line of ``array[index]`` without waiting for it; `index` must be inside the array."""

    def codegen(context, builder, signature, arguments):
        pointer = _element_pointer(context, builder, signature.args[0], *arguments)
        byte_pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        int32 = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer.type, int32, int32, int32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        # for reading, into every cache consistency, as data
        builder.call(function, [byte_pointer, int32(0), int32(3), int32(1)])
        return context.get_dummy_value()

    return types.void(array, types.uint64), codegen


@intrinsic
def bits_of(typingctx, value):
    """The bits of a float64 as int64."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), codegen


@intrinsic
def has_wide_registers(typingctx):
    """Whether code is compiled for 32 vector registers of 64 bytes; a constant, so no branch is left."""

    def codegen(context, builder, signature, arguments):
        _triple, name, features = context.codegen().magic_tuple()
        return ir.IntType(1)(name == "x86-64-v4" or "+avx512f" in features.split(","))

    return types.boolean(), codegen


@intrinsic
def copy(typingctx, out, to, values, first, count):
    """``out[to : to + count] = values[first : first + count]``, as one memcpy; the two must not overlap."""

    def codegen(context, builder, signature, arguments):
        out, to, values, first, count = arguments
        target = _element_pointer(context, builder, signature.args[0], out, to)
        source = _element_pointer(context, builder, signature.args[2], values, first)
        cgutils.raw_memcpy(builder, target, source, count, context.get_abi_sizeof(target.type.pointee))
        return context.get_dummy_value()

    return types.void(out, types.uint64, values, types.uint64, types.uint64), codegen


def _compare(context, builder, signature, arguments, lanes, predicate):
    """Compare `lanes` neighbours with one value and pack the outcomes into the low bits of a uint64."""
    array, index, value = arguments
    pointer = _element_pointer(context, builder, signature.args[0], array, index)
    vector = ir.VectorType(value.type, lanes)
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=value.type.width // 8)
    splat = ir.Constant(vector, ir.Undefined)
    for lane in range(lanes):
        splat = builder.insert_element(splat, value, ir.IntType(32)(lane))
    # A vector of one-bit lanes read as an integer: the processor's move-mask.
    mask = builder.bitcast(predicate(loaded, splat), ir.IntType(lanes))
    return builder.zext(mask, ir.IntType(64))


def _equal_mask(lanes):
    @intrinsic
    def equal_mask(typingctx, array, index, value):
        def codegen(context, builder, signature, arguments):
            def equal(left, right):
                return builder.icmp_unsigned("==", left, right)

            return _compare(context, builder, signature, arguments, lanes, equal)

        return types.uint64(array, types.uint64, array.dtype), codegen

    return equal_mask


# Bit j of the result is set where ``array[index + j] == value``, for j below 4 or below 8.
equal_mask4 = _equal_mask(4)
equal_mask8 = _equal_mask(8)


@intrinsic
def negative_mask8(typingctx, array, index):
    """Bit j of the result is set where ``array[index + j] < 0``, for j in 0..7."""

    def codegen(context, builder, signature, arguments):
        def less(left, right):
            return builder.icmp_signed("<", left, right)

        zero = context.get_value_type(signature.args[0].dtype)(0)
        return _compare(context, builder, signature, (*arguments, zero), 8, less)

    return types.uint64(array, types.uint64), codegen


@intrinsic
def lowest_bit(typingctx, mask):
    """Index of the lowest set bit of a non-zero uint64."""

    def codegen(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.uint64(types.uint64), codegen
