"""The reference runs: what every pipelined mode must equal. Plain loops, to be read and believed."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from .. import ops
from ..data import JaggedBatch
from ..embedding import DenseOptimizer, DynamicTable, RowOptimizer
from ..nn import attach_grids
from .schedule import NESTPIPE, Task
from .window import DROPOUT_STREAM, Window, WindowProgram, take_grid


class Synchronous:
    """The reference of ``"batch"`` consistency: one process, the whole global batch at once, no overlap.

    It shares the kernels with the pipelined modes, and nothing else: no executor, no buffers, no exchange.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        table: DynamicTable,
        optimizer: RowOptimizer,
        dense: DenseOptimizer,
        seed: int = 0,
        grid_bits: int = ops.GRID_BITS,
    ):
        self.model, self.table, self.optimizer, self.dense = model, table, optimizer, dense
        self.seed, self.grid_bits = seed, grid_bits
        attach_grids(model, grid_bits)

    def step(self, batch: JaggedBatch) -> torch.Tensor:
        """Train on `batch`, the whole global batch of its step; returns its losses (B,)."""
        batch.validate()
        tokens = float(max(batch.num_tokens, 1))

        keys, inverse, _ = ops.unique(batch.occurrence_keys())
        table_rows = self.table.rows_of(keys)
        values = self.table.read(table_rows)
        rows = ops.gather_rows(values[:, : self.table.dim], inverse).requires_grad_()

        losses = self.model(batch, rows, ops.derive_seed(self.seed, DROPOUT_STREAM, batch.step))
        if batch.num_tokens:
            losses.sum().backward()
        gradient = rows.grad if rows.grad is not None else torch.zeros_like(rows)
        sums = ops.segment_sum(
            gradient, inverse, len(keys), level="batch", bits=self.grid_bits, name="embedding gradient"
        )

        mean = ops.from_grid(sums, tokens, self.grid_bits)
        self.optimizer.update(values, torch.arange(len(keys)), mean, batch.step + 1)
        self.table.write(table_rows, values)

        dense = {}
        for name, parameter in self.model.named_parameters():
            dense[name] = ops.from_grid(take_grid(name, parameter), tokens, self.grid_bits)
        self.dense.step(dense, batch.step + 1)
        return losses.detach()


def run_in_turn(
    program: WindowProgram, window: Window, span=lambda lane, task, window: nullcontext()
) -> None:
    """The reference of ``"window"`` consistency: the same cut on the same ranks, one stage after another.

    Nothing overlaps and nothing is kept from the batch before: each batch reads the table after the last one
    has written to it.
    """

    def run(stage: str, micro_batch: int | None = None) -> None:
        with span(NESTPIPE[stage].lane, Task(stage, window.number, micro_batch), window):
            program.actions[stage](window, micro_batch)

    for stage in ("prefetch", "h2d", "route", "retrieve"):
        run(stage)
    for i in range(program.config.micro_batches):
        for stage in ("exchange", "compute", "gradient_exchange"):
            run(stage, i)
    for stage in ("dense_reduce", "sparse_update", "dense_update", "write_back"):
        run(stage)
