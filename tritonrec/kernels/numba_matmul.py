# mypy: ignore-errors
"""The inner loop that the CPU's matrix products share: every element is summed in one fixed order.

    out[r, c] = ((out[r, c] + s_0) + s_1) + ...    s_i = terms 64 i to 64 i + 63 of a[r, k] * b[k, c]

A term is added by a fused multiply-add: s = round(s + a * b).

A single chain of a thousand terms would round each of them against the whole sum; short chains keep the error
of a long sum within that of a BLAS.

A BLAS chooses its kernel, its blocking and its use of fused multiply-add by shape, alignment, thread count
and CPU, so a row's bits can depend on its neighbours. Here no blocking can show: each element adds its terms
in the order above, each with one rounding, which is written as an instruction and not left to a compiler: a
processor without it computes the same bits, slowly. A tile of four rows by 64 columns stays in
vector registers while it walks the terms: 16 of AVX-512's 32. Where these are 16 of half the size, it has 16
columns, 8 registers: with 64 a product took 2.6 times the time on an AMD EPYC (Zen 3), for half of the tile
was in memory. It is written as LLVM IR because a compiler will not keep a loop's outputs in registers when it
cannot prove that the arrays are apart.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .caches import njit
from .numba_float import fma, fma_of_vectors
from .numba_intrinsics import has_wide_registers

U = np.uintp
ONE, FOUR, EIGHT, SIXTEEN = U(1), U(4), U(8), U(16)
CHAIN = U(64)
LINE = 16  # float32 of a cache line
INT32, INT64 = ir.IntType(32), ir.IntType(64)


def _tile(rows, vectors, lanes, masked=False):
    """A kernel that adds the products of `rows` by `vectors * lanes` elements, or of the first `columns`."""

    @intrinsic
    def tile(
        typingctx, out, out_first, out_row, a, a_first, a_row, a_term, b, b_first, b_term, terms, columns
    ):
        vector, bits = ir.VectorType(ir.FloatType(), lanes), ir.VectorType(ir.IntType(1), lanes)

        def codegen(context, builder, signature, arguments):
            out_data, a_data, b_data = (
                context.make_array(signature.args[n])(context, builder, arguments[n]).data for n in (0, 3, 7)
            )
            _, out_first, out_row, _, a_first, a_row, a_term, _, b_first, b_term, terms, columns = arguments

            zeros = ir.Constant(vector, [0.0] * lanes)

            def step(first, stride, count):
                return builder.add(first, builder.mul(stride, count))

            def lanes_at(data, first, block):
                place = builder.gep(data, [builder.add(first, INT64(lanes * block))])
                return builder.bitcast(place, vector.as_pointer())

            def splat(scalar):
                undefined = ir.Constant(vector, ir.Undefined)
                single = builder.insert_element(undefined, scalar, INT32(0))
                return builder.shuffle_vector(
                    single, undefined, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
                )

            def within(block):
                """Which lanes of a block of columns there are."""
                numbers = ir.VectorType(INT64, lanes)
                undefined = ir.Constant(numbers, ir.Undefined)
                single = builder.insert_element(undefined, columns, INT32(0))
                most = builder.shuffle_vector(
                    single, undefined, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
                )
                own = ir.Constant(numbers, [lanes * block + lane for lane in range(lanes)])
                return builder.icmp_unsigned("<", own, most)

            masks = [within(c) if masked else None for c in range(vectors)]

            def read(place, mask):
                if mask is None:
                    return builder.load(place, align=4)
                kind = ir.FunctionType(vector, [place.type, INT32, bits, vector])
                function = cgutils.get_or_insert_function(
                    builder.module, kind, f"llvm.masked.load.v{lanes}f32.p0"
                )
                return builder.call(function, [place, INT32(4), mask, zeros])

            def write(value, place, mask):
                if mask is None:
                    builder.store(value, place, align=4)
                    return
                kind = ir.FunctionType(ir.VoidType(), [vector, place.type, INT32, bits])
                function = cgutils.get_or_insert_function(
                    builder.module, kind, f"llvm.masked.store.v{lanes}f32.p0"
                )
                builder.call(function, [value, place, INT32(4), mask])

            places = [
                lanes_at(out_data, step(out_first, out_row, INT64(r)), c)
                for r in range(rows) for c in range(vectors)
            ]  # fmt: skip
            fused = fma_of_vectors(builder, vector)
            # Allocas whose address is never taken: LLVM keeps them in registers.
            sums = [cgutils.alloca_once_value(builder, zeros) for _ in places]
            with cgutils.for_range(builder, terms) as loop:
                b_row = step(b_first, b_term, loop.index)
                # One load of b serves all rows of the tile, one splat of a all its columns.
                right = [read(lanes_at(b_data, b_row, c), masks[c]) for c in range(vectors)]
                column = step(a_first, a_term, loop.index)
                for r in range(rows):
                    place = builder.gep(a_data, [step(column, a_row, INT64(r))])
                    left = splat(builder.load(place))
                    for c in range(vectors):
                        total = sums[r * vectors + c]
                        builder.store(builder.call(fused, [left, right[c], builder.load(total)]), total)
            for place, total, mask in zip(places, sums, masks * rows, strict=True):
                # A chain begins at zero and is added to `out` as a whole: out + s_i.
                joined = builder.fadd(read(place, mask), builder.load(total))
                write(joined, place, mask)
            return context.get_dummy_value()

        size = types.uintp
        return types.void(out, size, size, a, size, size, size, b, size, size, size, size), codegen

    return tile


def _by_one(lanes, groups):
    """A kernel that adds the products of `groups * lanes` rows of `a`, terms one after another, by a column.

    Terms are a multiple of `lanes`. Blocks of `lanes` rows by as many terms are transposed in registers: lane
    r holds the sum of row r. The sums of several groups are made in turns, because each one waits for the
    multiply-add before.
    """

    @intrinsic
    def by_one(typingctx, out, out_first, out_row, a, a_first, a_row, b, b_first, b_term, terms):
        vector = ir.VectorType(ir.FloatType(), lanes)

        def codegen(context, builder, signature, arguments):
            out_data, a_data, b_data = (
                context.make_array(signature.args[n])(context, builder, arguments[n]).data for n in (0, 3, 6)
            )
            _, out_first, out_row, _, a_first, a_row, _, b_first, b_term, terms = arguments

            def at(data, first):
                return builder.bitcast(builder.gep(data, [first]), vector.as_pointer())

            def shuffled(left, right, of_lanes):
                return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(INT32, lanes), of_lanes))

            fused, zeros = fma_of_vectors(builder, vector), ir.Constant(vector, [0.0] * lanes)
            undefined = ir.Constant(vector, ir.Undefined)
            totals = [cgutils.alloca_once_value(builder, zeros) for _ in range(groups)]
            kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, INT32, INT32, INT32])
            fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            following = builder.add(a_first, builder.mul(a_row, INT64(lanes * groups)))
            with cgutils.for_range(builder, builder.udiv(terms, INT64(lanes))) as loop:
                term = builder.mul(loop.index, INT64(lanes))
                # Rows are read a few columns at a time, which a processor does not foresee: those of the next
                # call are fetched meanwhile, as they lie in memory. Without that a search took 1.25 times as
                # long on an AMD EPYC (Zen 3).
                ahead = builder.add(following, builder.mul(term, INT64(lanes * groups)))
                for start in range(0, lanes * lanes * groups, LINE):
                    place = builder.gep(a_data, [builder.add(ahead, INT64(start))])
                    line_there = builder.bitcast(place, cgutils.voidptr_t)
                    builder.call(fetch, [line_there, INT32(0), INT32(3), INT32(1)])
                column = []
                for k in range(lanes):
                    place = builder.add(b_first, builder.mul(b_term, builder.add(term, INT64(k))))
                    value = builder.load(builder.gep(b_data, [place]))
                    single = builder.insert_element(undefined, value, INT32(0))
                    column.append(shuffled(single, undefined, [0] * lanes))
                for group, total in enumerate(totals):
                    first = builder.add(a_first, term)
                    rows = [
                        builder.load(
                            at(a_data, builder.add(first, builder.mul(a_row, INT64(group * lanes + r)))),
                            align=4,
                        )
                        for r in range(lanes)
                    ]
                    step = 1
                    while step < lanes:  # blocks of `step` rows and columns change places
                        # Lanes from 0 on are of the first row, those from `lanes` on of the second.
                        of_low = [n - step + lanes if n & step else n for n in range(lanes)]
                        of_high = [n + lanes if n & step else n + step for n in range(lanes)]
                        for r in range(lanes):
                            if not r & step:
                                low, high = rows[r], rows[r | step]
                                rows[r] = shuffled(low, high, of_low)
                                rows[r | step] = shuffled(low, high, of_high)
                        step *= 2
                    for row, value in zip(rows, column, strict=True):
                        builder.store(builder.call(fused, [row, value, builder.load(total)]), total)
            for group, total in enumerate(totals):
                sums = builder.load(total)
                for r in range(lanes):
                    number = INT64(group * lanes + r)
                    place = builder.gep(out_data, [builder.add(out_first, builder.mul(out_row, number))])
                    own = builder.extract_element(sums, INT32(r))
                    builder.store(builder.fadd(builder.load(place), own), place)
            return context.get_dummy_value()

        size = types.uintp
        return types.void(out, size, size, a, size, size, b, size, size, size), codegen

    return by_one


_four_by_64, _four_by_16 = _tile(4, 4, 16), _tile(4, 1, 16)
_four_by_8, _four_by_4 = _tile(4, 1, 8), _tile(4, 1, 4)
_one_by_16, _one_by_4 = _tile(1, 1, 16), _tile(1, 1, 4)
_four_of_64, _four_of_32 = _tile(4, 4, 16, True), _tile(4, 2, 16, True)
_four_of_16, _one_of_16 = _tile(4, 1, 16, True), _tile(1, 1, 16, True)
_sixteen_by_one, _thirty_two_by_one = _by_one(16, 1), _by_one(8, 4)


@njit(cache=True, nogil=True)
def _add_wide(out, out_first, out_row, a, a_first, a_row, a_term, b, b_first, b_term, rows, terms, columns):
    """`_add_chains` where vectors have 64 bytes, and masks that cost nothing: no column is left over."""
    for c in range(U(0), columns, U(64)):
        # A masked tile loads and stores the first `left` columns alone,
        # and each element has the chain that it has in a full one.
        left = min(columns - c, U(64))
        f = b_first + c
        r = U(0)
        # A product with a vector: lanes are rows of the output, since there is one column only.
        if columns == ONE and a_term == ONE and terms % SIXTEEN == U(0):
            while r + SIXTEEN <= rows:
                o, p = out_first + r * out_row, a_first + r * a_row
                _sixteen_by_one(out, o, out_row, a, p, a_row, b, f, b_term, terms)
                r += SIXTEEN
        while r + FOUR <= rows:
            o, p = out_first + r * out_row + c, a_first + r * a_row
            if left == U(64):
                _four_by_64(out, o, out_row, a, p, a_row, a_term, b, f, b_term, terms, left)
            elif left > U(32):
                _four_of_64(out, o, out_row, a, p, a_row, a_term, b, f, b_term, terms, left)
            elif left > SIXTEEN:
                _four_of_32(out, o, out_row, a, p, a_row, a_term, b, f, b_term, terms, left)
            else:
                _four_of_16(out, o, out_row, a, p, a_row, a_term, b, f, b_term, terms, left)
            r += FOUR
        while r < rows:
            o, p = out_first + r * out_row + c, a_first + r * a_row
            for d in range(U(0), left, SIXTEEN):
                _one_of_16(out, o + d, out_row, a, p, a_row, a_term, b, f + d, b_term, terms, left - d)
            r += ONE


@njit(cache=True, nogil=True)
def _add_narrow(out, out_first, out_row, a, a_first, a_row, a_term, b, b_first, b_term, rows, terms, columns):
    """`_add_chains` where vectors have 32 bytes or fewer."""
    c = U(0)
    while c + FOUR <= columns:
        left = columns - c
        width = SIXTEEN if left >= SIXTEEN else EIGHT if left >= EIGHT else FOUR
        f = b_first + c
        r = U(0)
        while r + FOUR <= rows:
            o, p = out_first + r * out_row + c, a_first + r * a_row
            if width == SIXTEEN:
                _four_by_16(out, o, out_row, a, p, a_row, a_term, b, f, b_term, terms, width)
            elif width == EIGHT:
                _four_by_8(out, o, out_row, a, p, a_row, a_term, b, f, b_term, terms, width)
            else:
                _four_by_4(out, o, out_row, a, p, a_row, a_term, b, f, b_term, terms, width)
            r += FOUR
        while r < rows:
            o, p = out_first + r * out_row + c, a_first + r * a_row
            if width == SIXTEEN:
                _one_by_16(out, o, out_row, a, p, a_row, a_term, b, f, b_term, terms, width)
            else:
                for d in range(U(0), width, FOUR):
                    _one_by_4(out, o + d, out_row, a, p, a_row, a_term, b, f + d, b_term, terms, FOUR)
            r += ONE
        c += width
    while c < columns:
        r = U(0)
        if a_term == ONE and terms % EIGHT == U(0):  # one sum alone would wait for each multiply-add
            while r + U(32) <= rows:
                o, p = out_first + r * out_row + c, a_first + r * a_row
                _thirty_two_by_one(out, o, out_row, a, p, a_row, b, b_first + c, b_term, terms)
                r += U(32)
        for row in range(r, rows):
            total = np.float32(0.0)
            for k in range(terms):
                total = fma(a[a_first + row * a_row + k * a_term], b[b_first + k * b_term + c], total)
            out[out_first + row * out_row + c] += total
        c += ONE


@njit(cache=True, nogil=True)
def _add_chains(out, out_first, out_row, a, a_first, a_row, a_term, b, b_first, b_term, rows, terms, columns):
    """`add_products` with one chain for all terms."""
    if has_wide_registers():
        _add_wide(
            out, out_first, out_row, a, a_first, a_row, a_term, b, b_first, b_term, rows, terms, columns
        )
    else:
        _add_narrow(
            out, out_first, out_row, a, a_first, a_row, a_term, b, b_first, b_term, rows, terms, columns
        )


@njit(cache=True, nogil=True)
def add_products(
    out, out_first, out_row, a, a_first, a_row, a_term, b, b_first, b_term, rows, terms, columns
):
    """``out[r, c] += sum over k of a[r, k] * b[k, c]``, in chains of 64 terms.

    All arrays are flat float32, all numbers uintp: out[r, c] is ``out[out_first + r * out_row + c]``, a[r, k]
    is ``a[a_first + r * a_row + k * a_term]``, b[k, c] is ``b[b_first + k * b_term + c]``. `out` overlaps
    neither `a` nor `b`.
    """
    k = U(0)
    while k < terms:
        chain = min(CHAIN, terms - k)
        _add_chains(
            out, out_first, out_row, a, a_first + k * a_term, a_row, a_term, b, b_first + k * b_term, b_term,
            rows, chain, columns,
        )  # fmt: skip
        k += CHAIN


@njit(cache=True, nogil=True)
def add_column_products(out, a, a_row, b, rows, terms):
    """`add_products` of rows of `a` from its first one on by a column: out (rows + 1,), its last one is lost.

    Rows that come from memory are first read line by line, in the order in which they lie. To transpose them
    a tile goes from row to row, each on another page perhaps: without that 100,000 rows of 64 took three
    times as long in a virtual machine.
    """
    group = SIXTEEN if has_wide_registers() else U(32)
    seen, r = np.float32(0.0), U(0)
    while r + group <= rows and terms % SIXTEEN == U(0):
        for i in range(r * a_row, (r + group - ONE) * a_row + terms, SIXTEEN):
            seen += a[i]
        for k in range(U(0), terms, CHAIN):
            chain, first = min(CHAIN, terms - k), r * a_row + k
            if has_wide_registers():
                _sixteen_by_one(out, r, ONE, a, first, a_row, b, k, ONE, chain)
            else:
                _thirty_two_by_one(out, r, ONE, a, first, a_row, b, k, ONE, chain)
        r += group
    out[rows] = seen  # or a compiler would leave the reads out
    add_products(out, r, ONE, a, r * a_row, a_row, ONE, b, U(0), ONE, rows - r, terms, ONE)
