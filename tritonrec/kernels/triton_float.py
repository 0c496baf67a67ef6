# mypy: ignore-errors
"""`kernels.numba_float.exp` in Triton: the same single IEEE operations, so the same bits.

`tl.exp` is the device's own approximation. This one is as good on every backend and in the interpreter,
provided that the kernel is launched with `enable_fp_fusion=False`.
"""

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """e**x within 2 ulp for x in [-87, 88]; x outside is taken as the end of the range, NaN as 88."""
    # a comparison treats NaN alike on every backend, unlike a minimum
    x = tl.where(x < 88.0, x, 88.0)
    x = tl.where(x > -87.0, x, -87.0)
    n = tl.floor(x * 1.44269504088896341 + 0.5)
    # ln 2 in two parts: n times the first is exact, so r keeps its last digits
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    # Cephes' polynomial for |r| <= ln(2) / 2, in Horner's order
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    y = y * r + 8.3334519073e-3
    y = y * r + 4.1665795894e-2
    y = y * r + 1.6666665459e-1
    y = y * r + 5.0000001201e-1
    y = (y * (r * r) + r) + 1.0
    # 2**n from its bits: the range of x keeps n + 127 within 1 and 254
    return y * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def divide(a, b):
    """a / b of two float32 numbers, correctly rounded.

    Ascend's compiler ends at a division of numbers, and at one of constants or of a single element, which it
    makes a division of numbers. So it is one of two elements.
    """
    one = tl.arange(0, 2).to(tl.float32) * 0.0 + 1.0
    return tl.max(tl.div_rn(a * one, b * one), axis=0)
