"""The training job that the harness runs: its data, its model, its tables; the same on every rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from ..data import Interactions, NextItemLoader, load
from ..embedding import DenseOptimizer, DynamicTable, OptimizerName, RowOptimizer
from ..nn import HSTU, HSTUConfig


@dataclass(frozen=True)
class Job:
    """A training job, as plain values that travel between processes.

    Args:
        data: ``ml-100k``, ``zipf[:options]`` or ``csv:PATH``.
        batch_size: samples of the global batch. max_seq_len: tokens per sample at most.
        num_negatives: sampled items per token.
        model: sizes and dropout of the dense model.
        lr, eps: of rows and dense parameters. seed: of everything drawn.
        slots: slots of the key structure at the start; small, so that growth is exercised.
        chunk_rows: rows of a value chunk.
    """

    data: str = "ml-100k"
    batch_size: int = 32
    max_seq_len: int = 50
    num_negatives: int = 8
    model: HSTUConfig = field(default_factory=lambda: HSTUConfig())
    lr: float = 1e-3
    eps: float = 1e-8
    seed: int = 0
    slots: int = 64
    chunk_rows: int = 65536

    def loader(self, rank: int = 0, world_size: int = 1) -> NextItemLoader:
        """Batches of one rank."""
        return NextItemLoader(
            _interactions(self.data), self.batch_size, self.max_seq_len, self.num_negatives, self.seed,
            rank, world_size,
        )  # fmt: skip

    def build(
        self, optimizer: OptimizerName
    ) -> tuple[torch.nn.Module, DynamicTable, RowOptimizer, DenseOptimizer]:
        """A fresh model, an empty shard, the rule of its rows, and the dense optimizer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = HSTU(self.model)
        rule = RowOptimizer(optimizer, self.lr, self.eps)
        dim = self.model.dim
        table = DynamicTable(
            dim,
            rule.row_width(dim),
            seed=self.seed,
            scale=dim**-0.5,
            slots=self.slots,
            chunk_rows=self.chunk_rows,
        )
        return model, table, rule, DenseOptimizer(model.named_parameters(), rule)

    def on(self, data: str) -> Job:
        """The same job on another log; itself for an empty name."""
        return replace(self, data=data) if data else self

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@lru_cache(maxsize=4)
def _interactions(spec: str) -> Interactions:
    return load(spec)
