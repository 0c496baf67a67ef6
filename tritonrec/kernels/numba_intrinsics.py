# mypy: ignore-errors
"""Three instructions numba has no name for, written as LLVM IR so that every CPU gets its own lowering.

A kernel that visits a large table at random is bound by memory latency. Asking for a block of cache lines
first (`prefetch`) and comparing a whole line at once (`equal_mask8`, `negative_mask8`) is what makes it fast.
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
        # for reading, into every cache level, as data
        builder.call(function, [byte_pointer, int32(0), int32(3), int32(1)])
        return context.get_dummy_value()

    return types.void(array, types.uint64), codegen


def _mask8(context, builder, signature, array, index, compare):
    """Load eight neighbours and pack eight comparisons into the low bits of a uint64."""
    array_type = signature.args[0]
    pointer = _element_pointer(context, builder, array_type, array, index)
    lane = context.get_value_type(array_type.dtype)
    vector = ir.VectorType(lane, 8)
    lanes = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=lane.width // 8)
    mask = builder.bitcast(compare(lanes, vector), ir.IntType(8))
    return builder.zext(mask, ir.IntType(64))


@intrinsic
def equal_mask8(typingctx, array, index, value):
    """Bit j of the result is set where ``array[index + j] == value``, for j in 0..7."""

    def codegen(context, builder, signature, arguments):
        array_value, index_value, scalar = arguments

        def compare(lanes, vector):
            splat = ir.Constant(vector, ir.Undefined)
            for lane in range(8):
                splat = builder.insert_element(splat, scalar, ir.IntType(32)(lane))
            return builder.icmp_unsigned("==", lanes, splat)

        return _mask8(context, builder, signature, array_value, index_value, compare)

    return types.uint64(array, types.uint64, array.dtype), codegen


@intrinsic
def negative_mask8(typingctx, array, index):
    """Bit j of the result is set where ``array[index + j] < 0``, for j in 0..7."""

    def codegen(context, builder, signature, arguments):
        array_value, index_value = arguments

        def compare(lanes, vector):
            return builder.icmp_signed("<", lanes, ir.Constant(vector, None))

        return _mask8(context, builder, signature, array_value, index_value, compare)

    return types.uint64(array, types.uint64), codegen


@intrinsic
def lowest_bit(typingctx, mask):
    """Index of the lowest set bit of a non-zero uint64."""

    def codegen(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.uint64(types.uint64), codegen
