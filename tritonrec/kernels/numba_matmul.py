# mypy: ignore-errors
"""The inner loop that the CPU's matrix products share: every element is one sum in ascending order.

    out[r, c] = ((out[r, c] + a[r, 0] * b[0, c]) + a[r, 1] * b[1, c]) + ...

A BLAS chooses its kernel, its blocking and its use of fused multiply-add by shape, alignment, thread count
and CPU, so a row's bits can depend on its neighbours. Here no blocking can show: four rows and four terms at
a time go through registers, but each element adds its terms one after another, multiplied and added with a
rounding each. The loop over columns is what vectorises.
"""

import numpy as np
from numba import njit

U = np.uintp
ONE, TWO, THREE, FOUR = U(1), U(2), U(3), U(4)


@njit(cache=True, nogil=True)
def add_products(
    out, out_first, out_row, a, a_first, a_row, a_term, b, b_first, b_term, rows, terms, columns
):
    """``out[r, c] += sum over k of a[r, k] * b[k, c]``, k ascending.

    All arrays are flat float32, all numbers uintp: out[r, c] is ``out[out_first + r * out_row + c]``, a[r, k]
    is ``a[a_first + r * a_row + k * a_term]``, b[k, c] is ``b[b_first + k * b_term + c]``.
    """
    r = U(0)
    while r + FOUR <= rows:
        o0 = out_first + r * out_row
        o1 = o0 + out_row
        o2 = o1 + out_row
        o3 = o2 + out_row
        k = U(0)
        while k + FOUR <= terms:
            p0 = a_first + r * a_row + k * a_term
            p1 = p0 + a_row
            p2 = p1 + a_row
            p3 = p2 + a_row
            a00, a01, a02, a03 = a[p0], a[p0 + a_term], a[p0 + TWO * a_term], a[p0 + THREE * a_term]
            a10, a11, a12, a13 = a[p1], a[p1 + a_term], a[p1 + TWO * a_term], a[p1 + THREE * a_term]
            a20, a21, a22, a23 = a[p2], a[p2 + a_term], a[p2 + TWO * a_term], a[p2 + THREE * a_term]
            a30, a31, a32, a33 = a[p3], a[p3 + a_term], a[p3 + TWO * a_term], a[p3 + THREE * a_term]
            b0 = b_first + k * b_term
            b1 = b0 + b_term
            b2 = b1 + b_term
            b3 = b2 + b_term
            for c in range(columns):
                x0, x1, x2, x3 = b[b0 + c], b[b1 + c], b[b2 + c], b[b3 + c]
                out[o0 + c] = (((out[o0 + c] + a00 * x0) + a01 * x1) + a02 * x2) + a03 * x3
                out[o1 + c] = (((out[o1 + c] + a10 * x0) + a11 * x1) + a12 * x2) + a13 * x3
                out[o2 + c] = (((out[o2 + c] + a20 * x0) + a21 * x1) + a22 * x2) + a23 * x3
                out[o3 + c] = (((out[o3 + c] + a30 * x0) + a31 * x1) + a32 * x2) + a33 * x3
            k += FOUR
        while k < terms:
            p0 = a_first + r * a_row + k * a_term
            a00, a10, a20, a30 = a[p0], a[p0 + a_row], a[p0 + TWO * a_row], a[p0 + THREE * a_row]
            b0 = b_first + k * b_term
            for c in range(columns):
                x0 = b[b0 + c]
                out[o0 + c] += a00 * x0
                out[o1 + c] += a10 * x0
                out[o2 + c] += a20 * x0
                out[o3 + c] += a30 * x0
            k += ONE
        r += FOUR
    while r < rows:
        o0 = out_first + r * out_row
        k = U(0)
        while k + FOUR <= terms:
            p0 = a_first + r * a_row + k * a_term
            a00, a01, a02, a03 = a[p0], a[p0 + a_term], a[p0 + TWO * a_term], a[p0 + THREE * a_term]
            b0 = b_first + k * b_term
            b1 = b0 + b_term
            b2 = b1 + b_term
            b3 = b2 + b_term
            for c in range(columns):
                x0, x1, x2, x3 = b[b0 + c], b[b1 + c], b[b2 + c], b[b3 + c]
                out[o0 + c] = (((out[o0 + c] + a00 * x0) + a01 * x1) + a02 * x2) + a03 * x3
            k += FOUR
        while k < terms:
            a00 = a[a_first + r * a_row + k * a_term]
            b0 = b_first + k * b_term
            for c in range(columns):
                out[o0 + c] += a00 * b[b0 + c]
            k += ONE
        r += ONE
