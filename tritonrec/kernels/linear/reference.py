"""The products written as loops over rows and samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise, product

import torch

from tritonrec.kernels.deferred import refuse
from tritonrec.kernels.fixed_point import ExactSumError
from tritonrec.kernels.fixed_point.reference import round_to_fixed_point
from tritonrec.kernels.fused import fused_multiply_add
from tritonrec.kernels.row_terms import add_rows

Bad = tuple[int, int, int, float | None]


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, _seq_offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """One row at a time, elementwise products and one sum along the row: no neighbour takes part."""
    rows = [(weight * row).sum(1) for row in x]
    out = torch.stack(rows) if rows else x.new_empty(0, weight.shape[0])
    return out if bias is None else out + bias


def linear_weight_grad(
    accumulator: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    seq_offsets: torch.Tensor | None,
    bits: int,
    name: str,
    bias_accumulator: torch.Tensor | None = None,
    bias_name: str = "",
) -> None:
    """See `tritonrec.kernels.linear.op.linear_weight_grad`."""
    for term, values in enumerate(_terms(dy, x, seq_offsets)):
        nearest = round_away if seq_offsets is None else round_to_fixed_point
        for row, column in product(*map(range, accumulator.shape)):
            value = float(values[row, column])
            units = nearest(value, bits)
            if units is None or not -(2**63) <= int(accumulator[row, column]) + units < 2**63:
                refuse(no_sum((term, row, column, value), bits, name))
                continue
            accumulator[row, column] += units
    if bias_accumulator is not None:
        add_rows(bias_accumulator, dy, bits, bias_name, "reference")


def _terms(dy: torch.Tensor, x: torch.Tensor, seq_offsets: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """(out, in) of each sample, summed in float32; without offsets the exact float64 product of each row."""
    if seq_offsets is None:
        yield from (torch.outer(one.double(), other.double()) for one, other in zip(dy, x, strict=True))
        return
    for start, stop in pairwise(seq_offsets.tolist()):
        total = torch.zeros(dy.shape[1], x.shape[1], dtype=torch.float32, device=dy.device)
        for t in range(start, stop):
            total = fused_multiply_add(dy[t].unsqueeze(1), x[t], total)
        yield total


def round_away(value: float, bits: int) -> int | None:
    """The nearest integer to ``value * 2**bits``, of two the one away from zero; None as in fixed point."""
    if not abs(value) < 2.0 ** (62 - bits):
        return None
    units = math.floor(abs(Fraction(value)) * 2**bits + Fraction(1, 2))
    return units if value > 0 else -units


def no_sum(bad: Bad, bits: int, name: str) -> ExactSumError:
    """The error for (sample, row, column, value), the first value that cannot be added; None: it is gone."""
    sample, row, column, value = bad
    fits = value is not None and abs(value) < 2.0 ** (62 - bits)
    into = f"element [{row}, {column}] of the sum" if fits else ""
    return ExactSumError(f"gradient of {name} by sample", (sample, row, column), value, bits, into)
