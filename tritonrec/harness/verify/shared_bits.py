"""A model whose floats are the same on all implementations, so that its reference may run on another one.

Dense kernels of Triton and of the CPU add floats in orders of their own. This model adds floats by left folds
alone, which all implementations share, and by torch's elementwise ops. The rest of a step is integers, moves,
exact sums and row updates: every stage has work, and its bits are those of the CPU's kernels.
"""

from __future__ import annotations

from functools import reduce

import torch

from ... import ops
from ...nn.modules import PositionalEmbedding
from ...nn.next_item import NextItemInput
from ...nn.tokens import Tokens
from ..job import Job


class FoldedScores(torch.nn.Module):
    """A token's loss is (1 - s)**2: s is the product of its row plus its position's with its label's row.

    Called as the trainer calls a model, with the rows of a `NextItemModel`, of which it takes no negatives.
    """

    def __init__(self, max_seq_len: int, dim: int):
        super().__init__()
        self.max_seq_len, self.positions = max_seq_len, PositionalEmbedding(max_seq_len, dim)

    def forward(self, batch: NextItemInput, rows: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
        """Losses (B,)."""
        count = len(batch.negatives)
        samples = torch.arange(len(batch.offsets) - 1, device=batch.offsets.device)
        tokens = Tokens.place(batch.offsets, samples, self.max_seq_len, batch.timestamps)
        items, labels = rows["item"][:count], rows["item"][count : 2 * count]
        products = (items + self.positions(tokens.positions)) * labels
        missing = 1 - reduce(torch.add, products.unbind(1))
        losses = (missing * missing).unsqueeze(1)
        return ops.segment_sum(losses, tokens.sample_ids, len(samples)).squeeze(1)


class FoldedJob(Job):
    """The job with `FoldedScores` in place of its model."""

    def _model(self) -> torch.nn.Module:
        return FoldedScores(self.sizes.max_seq_len, self.sizes.dim)
