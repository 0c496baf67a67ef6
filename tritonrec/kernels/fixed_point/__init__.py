"""Sums that come out the same in any order: values rounded once to multiples of 2**-36, added as int64."""

from tritonrec.kernels.fixed_point.errors import FRACTION_BITS, ExactSumError
from tritonrec.kernels.fixed_point.op import check_summed, from_fixed_point, to_fixed_point

__all__ = ["FRACTION_BITS", "ExactSumError", "check_summed", "from_fixed_point", "to_fixed_point"]
