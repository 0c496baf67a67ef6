"""The products written as loops over rows and samples."""

from __future__ import annotations

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
    seq_offsets: torch.Tensor,
    bits: int,
    name: str,
    bias_accumulator: torch.Tensor | None = None,
    bias_name: str = "",
) -> None:
    """See `tritonrec.kernels.linear.op.linear_weight_grad`."""
    for sample, (start, stop) in enumerate(
        zip(seq_offsets[:-1].tolist(), seq_offsets[1:].tolist(), strict=True)
    ):
        product = torch.zeros_like(accumulator, dtype=torch.float32)
        for t in range(start, stop):
            product = fused_multiply_add(dy[t].unsqueeze(1), x[t], product)
        for row, values in enumerate(product.tolist()):
            for column, value in enumerate(values):
                term = round_to_fixed_point(value, bits)
                if term is None or not -(2**63) <= int(accumulator[row, column]) + term < 2**63:
                    refuse(no_sum((sample, row, column, value), bits, name))
                    continue
                accumulator[row, column] += term
    if bias_accumulator is not None:
        add_rows(bias_accumulator, dy, bits, bias_name, "reference")


def no_sum(bad: Bad, bits: int, name: str) -> ExactSumError:
    """The error for (sample, row, column, value), the first value that cannot be added; None: it is gone."""
    sample, row, column, value = bad
    fits = value is not None and abs(value) < 2.0 ** (62 - bits)
    into = f"element [{row}, {column}] of the sum" if fits else ""
    return ExactSumError(f"gradient of {name} by sample", (sample, row, column), value, bits, into)
