"""Sums that come out the same in any order: values rounded once to multiples of 2**-36, added as int64."""
