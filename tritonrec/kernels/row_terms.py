"""Gradients that are sums over rows: one term for each token, sample or occurrence."""

from __future__ import annotations

import torch

from tritonrec.kernels.gradients import Terms
from tritonrec.kernels.segment_sum import segment_sum


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
        _add(values, rows, sums.view(1, -1), fraction_bits, name)


class IndexedTerms(Terms):
    """Terms (K, D), of which the k-th belongs to row ``rows[k]`` of a parameter (R, D)."""

    def __init__(self, values: torch.Tensor, rows: torch.Tensor, num_rows: int):
        self._values, self._rows, self._num_rows = values, rows, num_rows

    def total(self) -> torch.Tensor:
        """Sums (R, D), in order of occurrence."""
        return segment_sum(self._values, self._rows, self._num_rows)

    def add_to(self, sums: torch.Tensor, fraction_bits: int, name: str) -> None:
        """As `Terms.add_to`."""
        _add(self._values.detach(), self._rows, sums, fraction_bits, name)


def _add(values: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor, bits: int, name: str) -> None:
    segment_sum(
        values.contiguous(), rows, len(sums), consistency="batch", out=sums, bits=bits,
        name=f"gradient of {name}",
    )  # fmt: skip
