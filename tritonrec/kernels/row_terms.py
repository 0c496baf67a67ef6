"""Gradients that are sums over rows: one term for each token or sample."""

from __future__ import annotations

import torch

from tritonrec.kernels.gradients import Terms
from tritonrec.kernels.rows.register import SEGMENT_SUM_INTO


class RowTerms(Terms):
    """Terms (n, *shape) of a parameter's gradient, of the parameter's shape.

    Args:
        values: float32. dtype: of the total, that of the parameter.
    """

    def __init__(self, values: torch.Tensor, dtype: torch.dtype = torch.float32):
        self._values, self._dtype = values, dtype

    def total(self) -> torch.Tensor:
        """The sum over the terms."""
        return self._values.sum(0).to(self._dtype)

    def add_to(self, sums: torch.Tensor, fraction_bits: int, name: str) -> None:
        """As `Terms.add_to`; terms are added in fixed point, so their order does not show."""
        values = self._values.detach().flatten(1)
        rows = torch.zeros(len(values), dtype=torch.int64, device=values.device)
        options = "batch", fraction_bits, f"gradient of {name}"
        SEGMENT_SUM_INTO.launch(sums.view(1, -1), values, rows, 1, *options)
