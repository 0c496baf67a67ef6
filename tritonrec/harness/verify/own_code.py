"""What a user writes in place of the job's parts: a model of torch's modules, and a loop of one's own.

Both must end in the bits of the reference, as the job's own models do in the trainer's modes.
"""

from __future__ import annotations

import torch

from ... import nn, ops
from ...data import JaggedBatch, split
from ...distributed import Communicators
from ...embedding import HashEmbeddingCollection, HashOptimizer, HashTableCollection
from ...pipeline import DenseModel
from ...pipeline.stages.window import DROPOUT_STREAM
from ..job import Job
from .state import State, dense_state, loss_state, table_state


class SASRec(torch.nn.Module):
    """Kang and McAuley 2018, of torch's modules: x (B, T, d), hidden (B, T) true where there is no token."""

    def __init__(self, sizes: nn.HSTUConfig):
        super().__init__()
        dim, dropout = sizes.dim, sizes.dropout
        self.positions, self.drop = torch.nn.Embedding(sizes.max_seq_len, dim), torch.nn.Dropout(dropout)
        layer = torch.nn.TransformerEncoderLayer(
            dim, sizes.heads, dim, dropout, batch_first=True, norm_first=True
        )
        norm = torch.nn.LayerNorm(dim)
        self.encoder = torch.nn.TransformerEncoder(layer, sizes.layers, norm, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        x = self.drop(x + self.positions(places[None]))
        later = torch.ones(len(places), len(places), dtype=torch.bool, device=x.device).triu(1)
        out: torch.Tensor = self.encoder(x, mask=later, src_key_padding_mask=hidden)
        return out


class ConvertedJob(Job):
    """The job with `SASRec` in place of its model, converted by `nn.convert`, and binary cross entropy."""

    def _model(self) -> torch.nn.Module:
        model = nn.PaddedNextItem(SASRec(self.sizes), self.sizes.max_seq_len, loss="bce")
        nn.convert(model)
        return model


class OwnLoop:
    """Training without a `Trainer`: `HashEmbeddingCollection`, `HashOptimizer` and torch's optimizer.

    Args:
        parts: of `Job.build`. seed: of dropout, the trainer's. micro_batches: backward passes of a step.
    """

    def __init__(
        self,
        parts: tuple[torch.nn.Module, HashTableCollection, torch.optim.Optimizer | None],
        communicators: Communicators,
        micro_batches: int,
        seed: int,
    ):
        self.model, tables, optimizer = parts
        self.dense = DenseModel(self.model, optimizer)
        self.rows = HashEmbeddingCollection(tables, process_group=communicators.shard_control.group)
        self.row_optimizer = HashOptimizer(self.rows)
        self.sums = nn.GradientAccumulator(self.model)
        self.over, self.micro_batches, self.seed = communicators.control, micro_batches, seed

    def step(self, batch: JaggedBatch) -> State:
        """One update from this rank's samples; losses, parameters and rows after it."""
        terms = int(self.over.all_reduce(torch.tensor(batch.loss_terms, dtype=torch.int64), "loss terms"))
        self.rows.divisor = max(terms, 1)
        seed = ops.derive_seed(self.seed, DROPOUT_STREAM, batch.step)
        losses = [self.backward(batch.select(part), seed) for part in split(batch, self.micro_batches)]
        sums = self.over.all_reduce(self.sums.take_flat(), "dense gradients")
        self.dense.step(self.sums.views(ops.from_fixed_point(sums, float(self.rows.divisor))))
        self.row_optimizer.step()
        self.row_optimizer.zero_grad()
        return {
            **loss_state(batch.sample_ids, torch.cat(losses)),
            **dense_state(self.dense),
            **table_state(self.rows.tables),
        }

    def backward(self, batch: JaggedBatch, seed: int) -> torch.Tensor:
        """Losses of a micro-batch; without samples the ranks still look up and add gradients together."""
        with self.sums.active(), nn.samples(self.model, batch.sample_ids, batch.offsets, seed):
            rows = self.rows(batch.lookups())
            if not batch.num_samples:
                torch.cat([each.flatten() for each in rows.values()]).sum().backward()
                return torch.empty(0, dtype=torch.float32)
            losses: torch.Tensor = self.model(batch, rows, seed)
            losses.sum().backward()
        return losses.detach()
