"""The end of a next-item model on the CPU, for trainers: a layer norm, then losses by sample.

The bits are those of `norm_mul_dropout` without a gate and of `sampled_softmax.cpu_by_sample`, and of their
derivatives. Negatives are read where they lie. Dimensions: L tokens, K negatives per token, D features, B
samples, R rows of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from tritonrec.kernels.fixed_point.errors import report_sum
from tritonrec.kernels.gradients import Targets
from tritonrec.kernels.workers import over_ranges


class Bound:
    """One call: `forward`, then `backward`, with the same tensors, which fit each other.

    Args:
        weight, bias: (D,) float32, of the norm. eps: of the norm.
        valid: (L, K) bool. offsets: (B + 1,) int64, of L tokens. scale: 1 / temperature.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        valid: torch.Tensor,
        offsets: torch.Tensor,
        scale: float,
    ):
        from tritonrec.kernels.normed_losses import numba_normed_losses as at

        self._kernels = at  # of the table
        self._kept = weight, bias, valid, offsets  # the addresses of these are taken
        (tokens, count), dim, self._samples = valid.shape, len(weight), offsets.numel() - 1
        self._products = tokens * count * dim
        self._eps, self._scale = np.float32(eps), np.float32(scale)
        self._table = table = np.zeros(at.SIZE, np.int64)
        table[: at.HIDDEN] = tokens, dim, count, self._samples, offsets.data_ptr()
        table[at.VALID] = valid.data_ptr()
        table[at.WEIGHT : at.MEANS] = weight.data_ptr(), bias.data_ptr()

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, matrix: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Losses (B,) float32, hidden states (L, D), and what backward needs.

        Args:
            x: (L, D) float32. labels: (L, D) float32. matrix: (R, D) float32, and rows: (L * K,) int64, those
                of it that are the negatives; both stay until `backward`. All are contiguous.
        """
        at = self._kernels
        hidden, losses = torch.empty_like(x), x.new_empty(self._samples)
        means, rstds = x.new_empty(len(x)), x.new_empty(len(x))
        table = self._table
        table[at.HIDDEN : at.VALID] = hidden.data_ptr(), labels.data_ptr()
        table[at.LOSSES] = losses.data_ptr()
        table[at.MATRIX : at.SLOPES] = matrix.data_ptr(), len(matrix), rows.data_ptr()
        table[at.X] = x.data_ptr()
        table[at.MEANS : at.DX] = means.data_ptr(), rstds.data_ptr()
        self._over_samples(partial(at.forward, table, self._eps, self._scale), 4.0)
        return losses, hidden, [x, labels, matrix, rows, hidden, means, rstds]

    def backward(
        self, dlosses: torch.Tensor, dlabels: torch.Tensor, kept: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slopes (L * K,), dx, and each token's terms (L, D) of the gradients of weight and bias.

        The gradient of a negative is its slope times the token's hidden state. Overwrites `dlabels` (L, D).
        """
        at = self._kernels
        x, _labels, _matrix, rows, *_ = kept
        dhidden, dx, dweight, dbias = (torch.empty_like(x) for _ in range(4))
        slopes = x.new_empty(len(rows))
        table = self._table
        table[at.LOSSES : at.MATRIX] = dlosses.data_ptr(), dhidden.data_ptr(), dlabels.data_ptr()
        table[at.SLOPES] = slopes.data_ptr()
        table[at.DX : at.SUM_WEIGHT] = dx.data_ptr(), dweight.data_ptr(), dbias.data_ptr()
        self._over_samples(partial(at.backward, table, self._scale), 8.0)
        return slopes, dx, dweight, dbias

    def add_terms(self, terms: Sequence[torch.Tensor], targets: Targets) -> None:
        """Add the terms that `backward` returned to the sums of weight and bias.

        Raises `ExactSumError`.
        """
        at = self._kernels
        bits, table = targets.fraction_bits, self._table
        table[at.SUM_WEIGHT :] = [each.data_ptr() for each in targets.sums]
        found = at.add_terms(table, 2.0**bits, np.float32(2.0 ** (62 - bits)))
        for bad, values, name in zip(found, terms, targets.names, strict=True):
            if bad >= 0:
                rows = torch.zeros(len(values), dtype=torch.int64)
                report_sum(bad + 1, None, f"gradient of {name}", values, rows, bits)

    def _over_samples(self, run: Callable[[int, int], Any], cost: float) -> None:
        over_ranges(run, self._samples, cost * self._products)
