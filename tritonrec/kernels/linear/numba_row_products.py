# mypy: ignore-errors
"""Exact sums of outer products on the CPU: one fused multiply-add for each product, rounding included.

    accumulator[o, i] += sum over rows t of round(dy[t, o] * x[t, i] * 2**bits)

A unit is ``2**-bits``. Float64 numbers between 2**52 and 2**53 units lie one unit apart. So

    total = fma(dy, x, total),    total = 1.5 * 2**52 units at first

adds the exact product, rounded to a unit: the rounding of the addition is the rounding of the term, and the
bits of `total` less those it began with are the sum as an integer. This holds while the sum of a block of
rows is below 2**51 units, which the largest |dy| times the largest |x| of the block tells beforehand.

One thing is left: the addition rounds a tie, a product half a unit from two integers, to the even *sum*,
which depends on the terms before it. Therefore the last bit of each float64 x is set. It makes the product
larger by less than 2**-52 of itself, less than the distance of any product of two float32 numbers (48 bits)
from a tie on its other side, and a tie itself goes away from zero. No product of such an x is a tie while it
is below 2**51 units: its last bit would have to be half a unit, 2**52 times below its first.

The tile of products in registers is that of `kernels.numba_matmul`, in float64. It takes as long as a float64
matrix product of BLAS, twice a float32 one.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..caches import njit
from ..fixed_point.numba_fixed_point import CALM, is_calm
from ..numba_float import float_of_bits, fma_of_vectors
from ..numba_intrinsics import bits_of, has_wide_registers

U = np.uintp
INT32, INT64, DOUBLE = ir.IntType(32), ir.IntType(64), ir.DoubleType()
OUTPUTS = U(4)
"""Rows of the accumulator in a tile."""
WIDE, NARROW = U(32), U(12)
"""Columns of a tile: four vector registers of 64 bytes, or three of 32 (sums and factors fill all 16)."""
PANEL = U(3072)
"""Numbers of a panel of x, 24 KiB, which stays in the first-level cache with a smaller one of dy. The more
rows it has, the fewer passes go over the accumulator, which does not."""
ROOM = 2.0**-12
"""Times the limit ``2**(62 - bits)``: 2**50 units, half of what a block's sum may be."""
LAST_BIT = np.int64(1)
HALF = np.float64(0.5)


def _tile(vectors, lanes):
    """Adds the products of OUTPUTS by ``vectors * lanes`` elements of two panels to an int64 tile."""
    rows = int(OUTPUTS)

    @intrinsic
    def tile(typingctx, out, a, a_first, b, b_first, terms, start):
        vector, whole = ir.VectorType(DOUBLE, lanes), ir.VectorType(INT64, lanes)

        def codegen(context, builder, signature, arguments):
            out_data, a_data, b_data = (
                context.make_array(signature.args[n])(context, builder, arguments[n]).data for n in (0, 1, 3)
            )
            _, _, a_first, _, b_first, terms, start = arguments

            def splat(scalar):
                undefined = ir.Constant(vector, ir.Undefined)
                single = builder.insert_element(undefined, scalar, INT32(0))
                return builder.shuffle_vector(
                    single, undefined, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
                )

            def lanes_at(data, first, block, kind):
                place = builder.gep(data, [builder.add(first, INT64(lanes * block))])
                return builder.bitcast(place, kind.as_pointer())

            fused, begin = fma_of_vectors(builder, vector), splat(start)
            sums = [cgutils.alloca_once_value(builder, begin) for _ in range(rows * vectors)]
            with cgutils.for_range(builder, terms) as loop:
                b_row = builder.add(b_first, builder.mul(loop.index, INT64(lanes * vectors)))
                a_row = builder.add(a_first, builder.mul(loop.index, INT64(rows)))
                right = [builder.load(lanes_at(b_data, b_row, c, vector), align=8) for c in range(vectors)]
                for r in range(rows):
                    left = splat(builder.load(builder.gep(a_data, [builder.add(a_row, INT64(r))])))
                    for c in range(vectors):
                        total = sums[r * vectors + c]
                        builder.store(builder.call(fused, [left, right[c], builder.load(total)]), total)
            # In one binade, floats a unit apart have bits one apart: bits less bits are units.
            zero = builder.bitcast(begin, whole)
            for at, total in enumerate(sums):
                units = builder.sub(builder.bitcast(builder.load(total), whole), zero)
                builder.store(units, lanes_at(out_data, INT64(0), at, whole), align=8)
            return context.get_dummy_value()

        size = types.uintp
        return types.void(out, a, size, b, size, size, types.float64), codegen

    return tile


_four_by_32, _four_by_12 = _tile(4, 8), _tile(3, 4)


@intrinsic
def _float_bits(typingctx, value):
    """The bits of a float32 as int32."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], INT32)

    return types.int32(types.float32), codegen


@intrinsic
def _float_of(typingctx, bits):
    """The float64 with the bit pattern of an int64."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], DOUBLE)

    return types.float64(types.int64), codegen


@njit(cache=True, nogil=True)
def _largest(values, stride, first, rows, start, stop):
    """Bits of the largest magnitude of columns [start, stop): integers in the same order, NaN the largest."""
    most = np.int32(0)
    for t in range(first, first + rows):
        row = t * stride
        for c in range(start, stop):
            most = max(most, _float_bits(values[row + c]) & np.int32(0x7FFFFFFF))
    return most


@njit(cache=True, nogil=True)
def _pack(panels, values, stride, first, rows, start, stop, width, with_last_bit):
    """Columns [start, stop) as float64 panels of `width` columns, row by row; zeros behind the end."""
    to = U(0)
    for c in range(start, stop, width):
        columns = min(width, stop - c)
        for t in range(first, first + rows):
            row = t * stride + c
            for d in range(columns):
                panels[to + d] = np.float64(values[row + d])
            for d in range(columns, width):
                panels[to + d] = 0.0
            to += width
    if with_last_bit:  # not of a zero, whose products are zeros (and it would be a slow, denormal number)
        for at in range(to):
            value = panels[at]
            panels[at] = _float_of(bits_of(value) | LAST_BIT) if value != 0.0 else value


@njit(cache=True, nogil=True)
def _add_block(
    accumulator, stride, of_dy, of_x, panel_rows, done, rows, start, stop, inner, begin, tile
):  # fmt: skip
    """Add rows [done, done + rows) of panels of `panel_rows` rows: their sums are below 2**51 units."""
    width = WIDE if has_wide_registers() else NARROW
    for c in range(U(0), inner, width):
        columns = min(width, inner - c)
        b_first = c * panel_rows + done * width
        for o in range(start, stop, OUTPUTS):
            a_first = (o - start) * panel_rows + done * OUTPUTS
            if has_wide_registers():
                _four_by_32(tile, of_dy, a_first, of_x, b_first, rows, begin)
            else:
                _four_by_12(tile, of_dy, a_first, of_x, b_first, rows, begin)
            for r in range(min(OUTPUTS, stop - o)):
                to = (o + r) * stride + c
                for d in range(columns):
                    accumulator[to + d] += tile[r * width + d]


@njit(cache=True, nogil=True)
def _add_one_by_one(
    accumulator, stride, dy, dy_stride, x, x_stride, first, rows, start, stop, inner, scale, limit
):  # fmt: skip
    """Any rows, each product checked: (row, o, i) and value of the first that cannot be added, or -1."""
    for t in range(first, first + rows):
        for o in range(start, stop):
            left = np.float64(dy[t * dy_stride + o])
            for i in range(inner):
                value = left * np.float64(x[t * x_stride + i])  # exact: 48 bits
                if not (abs(value) < limit):
                    return np.int64(t), np.int64(o), np.int64(i), value
                units = np.int64(np.floor(abs(value) * scale + HALF))
                term = units if value > 0.0 else -units
                before = accumulator[o * stride + i]
                after = before + term
                if ((before ^ after) & (term ^ after)) < 0:
                    return np.int64(t), np.int64(o), np.int64(i), value
                accumulator[o * stride + i] = after
    return np.int64(-1), np.int64(-1), np.int64(-1), 0.0


@njit(cache=True, nogil=True)
def _are_calm(accumulator, stride, start, stop, inner):
    calm = True
    for o in range(start, stop):
        calm = calm and is_calm(accumulator, o * stride, inner)
    return calm


@njit(cache=True, nogil=True)
def add_row_products(
    accumulator, stride, dy, dy_stride, x, x_stride, rows, start, stop, inner, scale, limit
):  # fmt: skip
    """Rows [start, stop) of the accumulator (out, inner), for all `rows` of dy and x.

    Arrays are flat, strides those of rows, numbers uintp but for the float64 `scale` ``2**bits`` and `limit`
    ``2**(62 - bits)``. Returns (row, o, i) and value of the first product that cannot be added, by row, then
    o, then i; (-1, -1, -1) without one.
    """
    width = WIDE if has_wide_registers() else NARROW
    block = PANEL // width
    of_x = np.empty(min(block, rows) * ((inner + width - U(1)) // width * width), np.float64)
    of_dy = np.empty(min(block, rows) * ((stop - start + OUTPUTS - U(1)) // OUTPUTS * OUTPUTS), np.float64)
    tile = np.empty(OUTPUTS * width, np.int64)
    # limit = 2**62 units, so `begin` is 1.5 * 2**52 units.
    begin, room = limit * (1.5 * 2.0**-10), limit * ROOM
    additions = np.int64(0)  # of blocks, 2**51 units each at most, that surely stay in int64
    for first in range(U(0), rows, block):
        count = min(block, rows - first)
        most_x = _largest(x, x_stride, first, count, U(0), inner)
        most_dy = _largest(dy, dy_stride, first, count, start, stop)
        most = np.float64(float_of_bits(most_x)) * np.float64(float_of_bits(most_dy))
        part = count
        # Fewer rows at a time, until no sum of a part can reach 2**51 units.
        while part > U(1) and most * part > room:
            part = (part + U(1)) // U(2)
        # Looked at once in a while: sums near zero take CALM additions before one can leave int64.
        if additions < block and _are_calm(accumulator, stride, start, stop, inner):
            additions = np.int64(CALM)
        if additions >= block and most * part <= room:  # which infinity and NaN are not
            _pack(of_x, x, x_stride, first, count, U(0), inner, width, True)
            _pack(of_dy, dy, dy_stride, first, count, start, stop, OUTPUTS, False)
            for done in range(U(0), count, part):
                _add_block(
                    accumulator, stride, of_dy, of_x, count, done, min(part, count - done), start, stop,
                    inner, begin, tile,
                )  # fmt: skip
                additions -= 1
            continue
        bad, o, i, value = _add_one_by_one(
            accumulator, stride, dy, dy_stride, x, x_stride, first, count, start, stop, inner, scale, limit
        )  # fmt: skip
        if bad >= 0:
            return bad, o, i, value
        additions = np.int64(0)  # sums may be anywhere in int64 now
    return np.int64(-1), np.int64(-1), np.int64(-1), 0.0
