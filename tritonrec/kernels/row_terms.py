"""Gradients that are sums over rows: one term for each token or sample."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tritonrec.kernels.autocast import widen
from tritonrec.kernels.dispatch import Impl, implementation
from tritonrec.kernels.gradients import Terms
from tritonrec.kernels.rows.op import SEGMENT_SUM_INTO


class RowTerms(Terms):
    """Terms (n, *shape) of a parameter's gradient, of the parameter's shape.

    Args:
        values: float32, bfloat16 or float16.
    """

    def __init__(self, values: torch.Tensor):
        self._values = values

    def total(self) -> torch.Tensor:
        """The sum over the terms."""
        return widen(self._values).sum(0)

    def add_to(self, sums: torch.Tensor, fraction_bits: int, name: str) -> None:
        """As `Terms.add_to`; terms are added in fixed point, so their order does not show."""
        add_rows(sums, self._values.detach(), fraction_bits, name)


def add_terms(
    sums: Iterable[torch.Tensor], terms: Iterable[torch.Tensor], fraction_bits: int, names: Iterable[str],
    impl: Impl = "auto",
) -> None:  # fmt: skip
    """`add_rows` of the terms of several parameters."""
    for total, values, name in zip(sums, terms, names, strict=True):
        add_rows(total, values, fraction_bits, name, impl)


def add_rows(
    sums: torch.Tensor, values: torch.Tensor, fraction_bits: int, name: str, impl: Impl = "auto"
) -> None:
    """Round terms (n, *shape) of the gradient of parameter `name` and add them to int64 `sums` (*shape)."""
    values = values.flatten(1)
    if implementation(impl, values) == "cpu":
        from tritonrec.kernels.rows.numba_segment_sum import add_rows as add_rows_on_cpu

        add_rows_on_cpu(sums, widen(values), fraction_bits, f"gradient of {name}")
        return
    rows = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    options = "batch", fraction_bits, f"gradient of {name}"
    SEGMENT_SUM_INTO.launch(sums.view(1, -1), values, rows, 1, *options, impl=impl)
