# mypy: ignore-errors
"""Float32 functions for CPU kernels whose bits depend on their argument alone.

A vectorised loop computes most elements in vector registers and the last few one by one; a library function
may differ between the two, so that a value depends on its place in the array. These are written with single
IEEE operations, which do not, and they vectorise because they do not branch.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .caches import njit

F32 = np.float32
LOG2_E = F32(1.44269504088896341)
LN_2_HIGH = F32(0.693359375)
LN_2_LOW = F32(-2.12194440e-4)
EXP_MOST = F32(88.0)
EXP_LEAST = F32(-87.0)


@intrinsic
def float_of_bits(typingctx, bits):
    """The float32 with the bit pattern of an int32."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """``a * b + c`` of float32 numbers, rounded once: an instruction, or a function of as many bits."""

    def codegen(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), codegen


@njit(cache=True, nogil=True, inline="always")
def exp(x):
    """e**x within 2 ulp for x in [-87, 88]; x outside is taken as the end of the range, NaN stays NaN.

    Cephes' expf: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial of degree 7 in r, then a shift of n into
    the exponent.
    """
    x = EXP_MOST if x > EXP_MOST else x
    x = EXP_LEAST if x < EXP_LEAST else x
    # n ln 2 is taken off in two parts: LN_2_HIGH has few bits, so that n * LN_2_HIGH is exact.
    n = np.floor(x * LOG2_E + F32(0.5))
    r = (x - n * LN_2_HIGH) - n * LN_2_LOW
    y = F32(1.9875691500e-4)
    y = y * r + F32(1.3981999507e-3)
    y = y * r + F32(8.3334519073e-3)
    y = y * r + F32(4.1665795894e-2)
    y = y * r + F32(1.6666665459e-1)
    y = y * r + F32(5.0000001201e-1)
    y = (y * (r * r) + r) + F32(1.0)
    # 2**n by its bits; n + 127 is in 1 .. 254 for the range of x.
    return y * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(cache=True, nogil=True, inline="always")
def sigmoid(x):
    return F32(1.0) / (F32(1.0) + exp(-x))


def fma_of_vectors(builder, vector):
    """`fma` of an LLVM vector type of float32 lanes, to be called with three of them."""
    kind = ir.FunctionType(vector, [vector] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{vector.count}f32")


@intrinsic
def _dot_blocks(typingctx, a, a_first, b, b_first, blocks):
    """Sum of products over 16 * blocks neighbours, fused: sixteen lanes, then halves added to halves.

    A compiler may not reorder a float sum, and without a reorder it cannot vectorise one; here the order is
    written down.
    """

    def codegen(context, builder, signature, arguments):
        vector = ir.VectorType(ir.FloatType(), 16)
        int64 = ir.IntType(64)

        def lanes(array_type, array, first, block):
            struct = context.make_array(array_type)(context, builder, array)
            place = builder.add(first, builder.mul(block, int64(16)))
            pointer = builder.gep(struct.data, [place])
            return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=4)

        a_value, a_place, b_value, b_place, count = arguments
        total = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * 16))
        fused = fma_of_vectors(builder, vector)
        with cgutils.for_range(builder, count) as loop:
            left = lanes(signature.args[0], a_value, a_place, loop.index)
            right = lanes(signature.args[2], b_value, b_place, loop.index)
            builder.store(builder.call(fused, [left, right, builder.load(total)]), total)
        joined = builder.load(total)
        width = 16
        # ((lanes 0-7 + lanes 8-15), then halves of that, ...): one order, written down.
        while width > 1:
            width //= 2
            halves = [ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(start, start + width)))
                      for start in (0, width)]  # fmt: skip
            low, high = (builder.shuffle_vector(joined, joined, half) for half in halves)
            joined = builder.fadd(low, high)
        return builder.extract_element(joined, ir.IntType(32)(0))

    return types.float32(a, types.uintp, b, types.uintp, types.uintp), codegen


@njit(cache=True, nogil=True)
def dot(a, a_first, b, b_first, count):
    """Sum of ``a[a_first + i] * b[b_first + i]`` in an order that depends on `count` alone.

    Flat float32 arrays; positions and `count` are uintp.
    """
    blocks = count // np.uintp(16)
    tail = F32(0.0)
    for i in range(blocks * np.uintp(16), count):
        tail = fma(a[a_first + i], b[b_first + i], tail)
    return _dot_blocks(a, a_first, b, b_first, blocks) + tail
