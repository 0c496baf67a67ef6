"""Jobs of variants: models and data beside the harness's own, and what is around a dense model's layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ... import nn, ops
from ...data import Batch, ClickBatch, ClickLoader, JaggedBatch, KeyedJaggedTensor, Split, WeightedLookup
from ...data.jagged import token_indices
from ...distributed import Communicators
from ...embedding import FeatureConfig
from ...nn import GRM, FuXi
from ...nn.modules import PositionalEmbedding
from ...nn.next_item import NextItemInput
from ...nn.tokens import Tokens
from ...pipeline.model_call import Shown
from ..job import Epochs, Job, _clicks


class PublishedJob(Job):
    """The job with FuXi-alpha's root mean square norm, or the norm of equation 3 of MTGRBoost in GRM."""

    def _model(self) -> torch.nn.Module:
        model = super()._model()
        if isinstance(model, FuXi):
            return FuXi(replace(model.config, norm="rms"))
        assert isinstance(model, GRM)
        return GRM(replace(model.config, norm_product=True))


@dataclass(frozen=True)
class WeightedClicks(ClickBatch):
    """A `ClickBatch` with a weighted bag of ids for each feature and sample."""

    lookups = Batch.lookups
    validate = Batch.validate


class WeightedClickLoader(ClickLoader):
    """Row s of the log has bags of (s mod 4) ids: its own and those of the rows before it."""

    def _rows(self, step: int, rows: Tensor) -> WeightedClicks:
        plain = super()._rows(step, rows)
        lengths = rows % 4
        positions, offsets = token_indices(torch.zeros_like(rows), lengths)
        owners = torch.repeat_interleave(rows, lengths)
        ids = self._categories[(owners - positions) % len(self._categories)]
        weights = (owners * 37 + positions * 11) % 16 / 7 - 1
        bags = {
            name: WeightedLookup(ids[:, at].contiguous(), offsets, weights)
            for at, name in enumerate(self.features)
        }
        features = KeyedJaggedTensor.from_dict(bags)
        return WeightedClicks(step, rows, features, plain.dense, plain.labels)


class WeightedJob(Job):
    """The job of a DLRM, on weighted bags."""

    def features(self) -> list[FeatureConfig]:
        """Those of the job, pooled."""
        return [replace(feature, pooling="sum") for feature in super().features()]

    def epochs(self, rank: int = 0, world_size: int = 1) -> Epochs:
        """The loader."""
        return WeightedClickLoader(
            _clicks(self.source, self.words, Split())[0],
            self.batch_size,
            self.seed,
            rank,
            world_size,
            self.balance,
        )


class FoldedScores(torch.nn.Module):
    """A model whose floats are the same on all implementations, so that its reference may run on another one.

    Dense kernels of Triton and of the CPU add floats in orders of their own. This model adds floats by left
    folds alone, which all implementations share, and by torch's elementwise ops. The rest of a step is
    integers, moves, exact sums and row updates: every stage has work, and its bits are those of the CPU's
    kernels.

    A token's loss is (1 - s)**2: s is the product of its row plus its position's with its label's row.

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


def wrap(job: Job, communicators: Communicators, model: torch.nn.Module) -> None:
    """Put what `Job.wrapping` says around the layers of the model. One rank alone has nothing to shard."""
    layers: Any = model.get_submodule("layers") if job.wrapping else ()
    if job.wrapping == "checkpoint":
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    elif job.wrapping == "fully_shard" and communicators.world_size > 1:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        group = communicators.checkpoint.group  # which no lane uses
        assert group is not None and communicators.replicas == 1
        mesh = DeviceMesh.from_group(group, torch.device(job.target.device).type)
        for each in (*layers, model):
            fully_shard(each, mesh=mesh)


class TwoTowers(torch.nn.Module):
    """A user of the sum of his items' rows, the item that follows them, and a learned scale of logits."""

    def __init__(self, sizes: nn.HSTUConfig):
        super().__init__()
        self.user, self.item = nn.Linear(sizes.dim, sizes.dim), nn.Linear(sizes.dim, sizes.dim)
        self.norm, self.drop = nn.LayerNorm(sizes.dim), nn.Dropout(sizes.dropout)
        self.scale = torch.nn.Parameter(torch.tensor([1.5], dtype=torch.float32))

    def forward(self, batch: JaggedBatch, rows: dict[str, torch.Tensor], seed: int) -> Shown:
        items, labels, _negatives = rows["item"].split(
            [batch.num_tokens, batch.num_tokens, batch.negatives.numel()]
        )
        owners = torch.repeat_interleave(
            torch.arange(batch.num_samples, dtype=torch.int64, device=items.device), batch.lengths
        )
        last = batch.offsets[1:] - 1
        with nn.padded():
            user = self.user(self.drop(self.norm(ops.segment_sum(items, owners, batch.num_samples))))
            item = self.item(labels[last])
        ids = batch.labels[last]
        return {"user": user, "item": item, "id": ids, "log_q": (ids % 7).float() / -3}

    def window_loss(self, own: Shown, window: Shown, positions: torch.Tensor) -> torch.Tensor:
        queries = own["user"] * nn.expand(self.scale, len(positions))
        return nn.in_batch_softmax(queries, window["item"], positions, window["id"], window["log_q"], 0.5)


class InBatchJob(Job):
    """The job with `TwoTowers` in place of its model."""

    def _model(self) -> torch.nn.Module:
        return TwoTowers(self.sizes)
