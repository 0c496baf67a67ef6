"""Sampled softmax by sample on the CPU, for trainers: losses and their gradients in one call each.

The bits are those of `sampled_softmax` and `segment_sum`, and of their derivatives. Dimensions: L tokens, K
negatives per token, D features, B samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tritonrec.kernels.offsets import check_offsets
from tritonrec.kernels.workers import over_ranges


class Bound:
    """One call: `forward`, then `backward`, with the same tensors.

    Args:
        valid: (L, K) bool. offsets: (B + 1,) int64. scale: 1 / temperature. dim: D.
    """

    def __init__(self, valid: torch.Tensor, offsets: torch.Tensor, scale: float, dim: int):
        (self._tokens, self._count), self._dim = valid.shape, dim
        self._samples = offsets.numel() - 1
        self.valid, self.offsets, self.scale = valid, offsets, scale
        self._sizes = [self._tokens, dim, self._count, self._samples, offsets.data_ptr()]

    def _table(self, hidden: torch.Tensor, items: torch.Tensor, *rest: torch.Tensor) -> np.ndarray:
        first = [hidden.data_ptr(), items.data_ptr(), self.valid.data_ptr()]
        return np.array([*self._sizes, *first, *(each.data_ptr() for each in rest)], np.int64)

    def forward(self, hidden: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Losses (B,) float32 of hidden (L, D) and items (L + L K, D), the labels before the negatives."""
        from tritonrec.kernels.sampled_softmax.numba_by_sample import forward

        losses = hidden.new_empty(self._samples)
        self._over_samples(forward, self._table(hidden, items, losses), 4.0)
        return losses

    def backward(
        self, dlosses: torch.Tensor, hidden: torch.Tensor, items: torch.Tensor, ditems: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of `hidden`; overwrites `ditems` with that of `items`."""
        from tritonrec.kernels.sampled_softmax.numba_by_sample import backward

        dhidden = torch.empty_like(hidden)
        self._over_samples(backward, self._table(hidden, items, dlosses, dhidden, ditems), 8.0)
        return dhidden

    def forward_rows(
        self, hidden: torch.Tensor, labels: torch.Tensor, matrix: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """`forward` of labels (L, D), and negatives that are `rows` (L * K,) of a matrix (R, D)."""
        from tritonrec.kernels.sampled_softmax.numba_by_sample import forward_rows

        losses = hidden.new_empty(self._samples)
        self._over_samples(forward_rows, self._table_of_rows(matrix, rows, hidden, labels, losses), 4.0)
        return losses

    def backward_rows(
        self,
        dlosses: torch.Tensor,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        matrix: torch.Tensor,
        rows: torch.Tensor,
        dlabels: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient of `hidden`, and slopes (L * K,): a negative's gradient is its slope times its token's
        hidden state. Overwrites `dlabels` (L, D).
        """
        from tritonrec.kernels.sampled_softmax.numba_by_sample import SLOPES, backward_rows

        dhidden, slopes = torch.empty_like(hidden), hidden.new_empty(len(rows))
        table = self._table_of_rows(matrix, rows, hidden, labels, dlosses, dhidden, dlabels)
        table[SLOPES] = slopes.data_ptr()
        self._over_samples(backward_rows, table, 8.0)
        return dhidden, slopes

    def _table_of_rows(self, matrix: torch.Tensor, rows: torch.Tensor, *tensors: torch.Tensor) -> np.ndarray:
        from tritonrec.kernels.sampled_softmax import numba_by_sample as at

        table, given = np.zeros(at.SIZE, np.int64), self._table(*tensors)
        table[: len(given)] = given
        table[at.MATRIX : at.SLOPES] = matrix.data_ptr(), len(matrix), rows.data_ptr()
        return table

    def _over_samples(self, kernel: Callable[..., None], table: Any, cost: float) -> None:
        scale, products = np.float32(self.scale), self._tokens * self._count * self._dim
        over_ranges(lambda start, stop: kernel(table, scale, start, stop), self._samples, cost * products)


def bind(
    hidden: torch.Tensor, items: torch.Tensor, valid: torch.Tensor, offsets: torch.Tensor, scale: float
) -> Bound | None:
    """The call, or None where arguments are of other kinds than those it takes, or do not fit."""
    tokens = hidden.shape[0]
    if hidden.dim() != 2 or valid.dim() != 2 or len(valid) != tokens or 0 in (tokens, hidden.shape[1]):
        return None
    if items.shape != (tokens * (1 + valid.shape[1]), hidden.shape[1]):
        return None
    if offsets.dim() != 1 or offsets.numel() < 2:
        return None
    wanted = (hidden, torch.float32), (items, torch.float32), (valid, torch.bool), (offsets, torch.int64)
    for tensor, dtype in wanted:
        if tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_neg():
            return None
    check_offsets("offsets", offsets, tokens)
    return Bound(valid, offsets, scale, hidden.shape[1])
