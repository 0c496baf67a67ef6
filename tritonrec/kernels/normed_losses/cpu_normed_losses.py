"""The end of a next-item model on the CPU, for trainers: a layer norm, then losses by sample.

The bits are those of `norm_mul_dropout` without a gate and of `sampled_softmax.cpu_by_sample`, and of their
derivatives. Dimensions: L tokens, K negatives per token, D features, B samples.
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

    def forward(self, x: torch.Tensor, items: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Losses (B,) float32, and what backward needs.

        Args:
            x: (L, D) float32. items: (L + L K, D) float32, the labels before the negatives.
        """
        at = self._kernels
        hidden, losses = torch.empty_like(x), x.new_empty(self._samples)
        means, rstds = x.new_empty(len(x)), x.new_empty(len(x))
        table = self._table
        table[at.HIDDEN : at.VALID] = hidden.data_ptr(), items.data_ptr()
        table[at.LOSSES] = losses.data_ptr()
        table[at.X] = x.data_ptr()
        table[at.MEANS : at.DX] = means.data_ptr(), rstds.data_ptr()
        self._over_samples(partial(at.forward, table, self._eps, self._scale), 4.0)
        return losses, [x, hidden, means, rstds]

    def backward(
        self, dlosses: torch.Tensor, items: torch.Tensor, ditems: torch.Tensor, kept: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dx, and each token's terms (L, D) of the gradients of weight and bias; overwrites `ditems`."""
        at = self._kernels
        x, *_ = kept
        dhidden, dx, dweight, dbias = (torch.empty_like(x) for _ in range(4))
        table = self._table
        table[at.LOSSES : at.X] = dlosses.data_ptr(), dhidden.data_ptr(), ditems.data_ptr()
        table[at.DX : at.SUM_WEIGHT] = dx.data_ptr(), dweight.data_ptr(), dbias.data_ptr()
        self._over_samples(partial(at.backward, table, self._scale), 8.0)
        return dx, dweight, dbias

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
