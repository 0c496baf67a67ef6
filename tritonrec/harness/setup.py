"""The training job that the harness runs: its data, its model, its tables; the same on every rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch

from ..data import Interactions, NextItemLoader, load
from ..embedding import (
    DenseOptimizer,
    FeatureConfig,
    HashTableCollection,
    OptimizerName,
    RowOptimizer,
    TablePolicy,
)  # fmt: skip
from ..nn import HSTU, HSTUConfig

ModelName = Literal["hstu"]


@dataclass(frozen=True)
class Job:
    """A training job, as plain values that travel between processes.

    Args:
        data: ``ml-100k``, ``zipf[:options]`` or ``csv:PATH``.
        model: which one; ``hstu`` predicts the next item.
        batch_size: samples of the global batch. max_seq_len: tokens per sample at most.
        num_negatives: sampled items per token.
        sizes: sizes and dropout of the dense model.
        lr, eps: of rows and dense parameters. seed: of everything drawn.
        slots: slots of a key structure at the start; small, so that growth is exercised.
        chunk_rows: rows of a value chunk.
        merge: keep tables of one dimension in one.
        policy: eviction, admission and storage by heat, of every table.
    """

    data: str = "ml-100k"
    model: ModelName = "hstu"
    batch_size: int = 32
    max_seq_len: int = 50
    num_negatives: int = 8
    sizes: HSTUConfig = field(default_factory=lambda: HSTUConfig())
    lr: float = 1e-3
    eps: float = 1e-8
    seed: int = 0
    slots: int = 64
    chunk_rows: int = 65536
    merge: bool = True
    policy: TablePolicy = field(default_factory=TablePolicy)

    def loader(self, rank: int = 0, world_size: int = 1) -> NextItemLoader:
        """Batches of one rank."""
        return NextItemLoader(
            _interactions(self.data), self.batch_size, self.max_seq_len, self.num_negatives, self.seed,
            rank, world_size,
        )  # fmt: skip

    def build(self, optimizer: OptimizerName) -> tuple[torch.nn.Module, HashTableCollection, DenseOptimizer]:
        """A fresh model, an empty shard of its tables, and the dense optimizer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = HSTU(self.sizes)
        return model, self.tables(optimizer), DenseOptimizer(model.named_parameters(), self.rule(optimizer))

    def tables(self, optimizer: OptimizerName) -> HashTableCollection:
        """Empty tables of the model's features."""
        return HashTableCollection(
            [FeatureConfig("item", self.sizes.dim, policy=self.policy)], self.rule(optimizer),
            merge=self.merge, seed=self.seed, slots=self.slots, chunk_rows=self.chunk_rows,
        )  # fmt: skip

    def rule(self, optimizer: OptimizerName) -> RowOptimizer:
        """The update rule of rows and dense parameters."""
        return RowOptimizer(optimizer, self.lr, self.eps)

    def on(self, data: str) -> Job:
        """The same job on another log; itself for an empty name."""
        return replace(self, data=data) if data else self

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@lru_cache(maxsize=4)
def _interactions(spec: str) -> Interactions:
    return load(spec)
