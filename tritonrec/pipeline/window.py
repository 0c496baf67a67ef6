"""What one rank does in each stage of a window (NestPipe, sections IV.A and V).

    W world size   N micro-batches   U_i unique keys of micro-batch i   K rows of this shard in the batch

Keys, embeddings and gradients travel grouped by rank and, inside a rank's part, by micro-batch:

    routed keys, W = 2, N = 2     | to rank 0          | to rank 1          |
                                  | mb 0     | mb 1    | mb 0   | mb 1      |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from .. import ops
from ..data import JaggedBatch, split
from ..distributed import Communicators
from ..embedding import DenseOptimizer, DynamicTable, RowOptimizer
from ..nn import attach_grids, detach_grids

Consistency = Literal["window", "batch"]
DROPOUT_STREAM = 0x64726F70  # one Philox stream for dropout seeds


class Model(Protocol):
    """A model gives per-sample losses (B,) from a batch and the embedding rows of its occurrences."""

    def __call__(self, batch: JaggedBatch, rows: torch.Tensor, seed: int) -> torch.Tensor: ...


@dataclass
class Window:
    """Everything the stages of one batch share; made by `prefetch`, dropped after `write_back`."""

    number: int  # batches of this run counted from 0; its parity chooses the buffer
    samples: JaggedBatch
    micro_batches: list[JaggedBatch] = field(default_factory=list)
    # routing, as the rank that asks: keys of each micro-batch grouped by owner
    inverse: list[torch.Tensor] = field(default_factory=list)  # occurrence -> row of the exchanged embeddings
    send: list[list[int]] = field(default_factory=list)  # [i][r]: keys of micro-batch i owned by rank r
    # routing, as the owner
    receive: list[list[int]] = field(default_factory=list)  # [i][r]: keys that rank r asks of this one
    received_keys: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    tokens: int = 0  # of the global batch, every rank's samples together
    # retrieval
    keys: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # (K,) distinct
    table_rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # (K,)
    wanted: list[torch.Tensor] = field(default_factory=list)  # [i]: buffer rows asked for, by source rank
    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))  # (K, row width)
    # the window
    embeddings: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    row_gradient: torch.Tensor | None = None  # (K, dim), fp32 or on the grid
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    sent_bytes: int = 0

    @property
    def step(self) -> int:
        """The training step, counted from 0 over all runs; dropout and bias correction go by it."""
        return self.samples.step


@dataclass(frozen=True)
class WindowConfig:
    """How a batch is cut and added up.

    Args:
        micro_batches: N; more micro-batches than samples leaves some empty, which is legal.
        consistency: ``"batch"`` adds gradients on the int64 grid, so that the result does not depend on the
            cut; ``"window"`` adds in float32 in the order of the micro-batches.
        clustering: group samples that share keys (NestPipe, section V.C) instead of cutting in order.
        grid_bits: grid of 2**-grid_bits for gradient sums.
        seed: of dropout.
    """

    micro_batches: int = 1
    consistency: Consistency = "batch"
    clustering: bool = False
    grid_bits: int = ops.GRID_BITS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"a batch has at least one micro-batch, got {self.micro_batches}")
        if self.consistency not in ("window", "batch"):
            raise ValueError(f"consistency must be 'window' or 'batch', got {self.consistency!r}")


class WindowProgram:
    """The stages of a rank, by name: ``actions[stage](window, micro_batch)``.

    Args:
        model: dense model, the same on every rank.
        table: this rank's shard; keys belong to ``ops.owner_of(key, world_size)``.
        optimizer: rule of the rows. dense: optimizer of the model's parameters.
        communicators: one for each lane that communicates.
        config: see `WindowConfig`.
        device: where samples and buffers go.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        table: DynamicTable,
        optimizer: RowOptimizer,
        dense: DenseOptimizer,
        communicators: Communicators,
        config: WindowConfig,
        device: str | torch.device = "cpu",
    ):
        self.model, self.table, self.optimizer, self.dense = model, table, optimizer, dense
        self.communicators, self.config, self.device = communicators, config, torch.device(device)
        self.exact = config.consistency == "batch"
        if self.exact:
            attach_grids(model, config.grid_bits)
        else:
            detach_grids(model)
        self._buffers: list[Window | None] = [None, None]
        self.actions = {
            name: getattr(self, name)
            for name in (
                "prefetch", "h2d", "route", "retrieve", "synchronise", "exchange", "compute",
                "gradient_exchange", "dense_reduce", "sparse_update", "dense_update", "write_back",
            )
        }  # fmt: skip

    # Lookup: from samples to rows in the prefetch buffer.

    def prefetch(self, window: Window, _micro_batch: int | None = None) -> None:
        """Cut this rank's samples into micro-batches (stage 1, section V.C)."""
        window.samples.validate()
        parts = split(window.samples, self.config.micro_batches, self.config.clustering)
        window.micro_batches = [window.samples.select(part) for part in parts]

    def h2d(self, window: Window, _micro_batch: int | None = None) -> None:
        """Move the micro-batches to the device (stage 2)."""
        window.micro_batches = [part.to(self.device, non_blocking=True) for part in window.micro_batches]

    def route(self, window: Window, _micro_batch: int | None = None) -> None:
        """Deduplicate each micro-batch's keys and send them to their owners (stage 3)."""
        world = self.communicators.world_size
        by_owner: list[list[torch.Tensor]] = [[] for _ in range(world)]
        for part in window.micro_batches:
            keys, inverse, _counts = ops.unique(part.occurrence_keys())
            permutation, counts = ops.bucketize(keys, world)
            place = torch.empty_like(permutation)
            place[permutation] = torch.arange(len(permutation), device=place.device)
            window.inverse.append(place[inverse])
            window.send.append(counts.tolist())
            for owner, bucket in enumerate(torch.split(keys[permutation], window.send[-1])):
                by_owner[owner].append(bucket)
        # One row for each rank: keys of every micro-batch, and this rank's tokens.
        counts = torch.tensor(window.send, dtype=torch.int64).t()
        tokens = torch.full((world, 1), window.samples.num_tokens, dtype=torch.int64)
        answer = self.communicators.routing.all_to_all_equal(torch.cat([counts, tokens], 1))
        window.tokens = int(answer[:, -1].sum())
        window.receive = answer[:, :-1].t().tolist()
        keys = torch.cat([bucket for buckets in by_owner for bucket in buckets])
        window.received_keys = self.communicators.routing.all_to_all(
            keys, [sum(column) for column in zip(*window.send, strict=True)],
            [sum(column) for column in zip(*window.receive, strict=True)],
        )  # fmt: skip

    def retrieve(self, window: Window, _micro_batch: int | None = None) -> None:
        """Deduplicate again, find or add the keys, copy their rows into the prefetch buffer (stage 4)."""
        window.keys, inverse, _counts = ops.unique(window.received_keys)
        window.table_rows = self.table.rows_of(window.keys)
        window.buffer = self.table.read(window.table_rows).to(self.device)
        lengths = [window.receive[i][r] for r in range(self.communicators.world_size)
                   for i in range(self.config.micro_batches)]  # fmt: skip
        pieces = torch.split(inverse, lengths)
        window.wanted = [torch.cat(pieces[i :: self.config.micro_batches]) for i in range(len(window.send))]
        dtype = torch.int64 if self.exact else torch.float32
        window.row_gradient = torch.zeros(len(window.keys), self.table.dim, dtype=dtype, device=self.device)
        self._buffers[window.number % 2] = window

    def synchronise(self, window: Window, _micro_batch: int | None = None) -> None:
        """Copy the rows of K(t-1) & K(t) from the active into the prefetch buffer (section IV.B)."""
        active = self._buffers[(window.number - 1) % 2]
        if active is None:
            return
        here, there = ops.intersect(active.keys, window.keys)
        ops.scatter_rows(window.buffer, there, ops.gather_rows(active.buffer, here))

    # The window: rows are frozen until `sparse_update`.

    def exchange(self, window: Window, micro_batch: int | None) -> None:
        """Send the rows that other ranks' micro-batch wants, receive those of this rank's."""
        i = _index(micro_batch)
        weights = ops.gather_rows(window.buffer[:, : self.table.dim], window.wanted[i])
        window.embeddings[i] = self._travel(window, weights, window.receive[i], window.send[i])

    def compute(self, window: Window, micro_batch: int | None) -> None:
        """Forward and backward of one micro-batch."""
        i = _index(micro_batch)
        part, inverse = window.micro_batches[i], window.inverse[i]
        embeddings = window.embeddings.pop(i)
        rows = ops.gather_rows(embeddings, inverse).requires_grad_()
        losses = self.model(part, rows, ops.derive_seed(self.config.seed, DROPOUT_STREAM, window.step))
        window.losses[i] = losses.detach()
        if part.num_tokens:
            losses.sum().backward()
        gradient = rows.grad if rows.grad is not None else torch.zeros_like(rows)
        window.gradients[i] = self._sum_rows(gradient, inverse, len(embeddings), "embedding gradient")

    def gradient_exchange(self, window: Window, micro_batch: int | None) -> None:
        """Send gradient rows to their owners and add them up there."""
        i = _index(micro_batch)
        gradients = self._travel(window, window.gradients.pop(i), window.send[i], window.receive[i])
        assert window.row_gradient is not None
        self._sum_rows(
            gradients, window.wanted[i], len(window.keys), "embedding gradient", out=window.row_gradient
        )

    # The end of the window: one update from complete sums.

    def dense_reduce(self, window: Window, _micro_batch: int | None = None) -> None:
        """Sum the dense gradients over the ranks, as one flat message."""
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        parts = [self._take_gradient(name, p) for name, p in zip(names, parameters, strict=True)]
        flat = torch.cat([part.reshape(-1) for part in parts])
        flat = self.communicators.reduce.all_reduce(flat, "dense gradients")
        pieces = torch.split(flat, [part.numel() for part in parts])
        for name, piece, parameter in zip(names, pieces, parameters, strict=True):
            window.dense[name] = self._mean(piece, window, name).view_as(parameter)

    def sparse_update(self, window: Window, _micro_batch: int | None = None) -> None:
        """Apply the rows' gradients to the active buffer, once per window."""
        assert window.row_gradient is not None
        gradient = self._mean(window.row_gradient, window, "embedding gradient")
        indices = torch.arange(len(window.keys), device=self.device)
        self.optimizer.update(window.buffer, indices, gradient, window.step + 1)
        window.row_gradient = None

    def dense_update(self, window: Window, _micro_batch: int | None = None) -> None:
        """Apply the dense gradients."""
        self.dense.step(window.dense, window.step + 1)
        window.dense = {}

    def write_back(self, window: Window, _micro_batch: int | None = None) -> None:
        """Copy the updated rows home to the table."""
        self.table.write(window.table_rows, window.buffer.cpu())

    # Sums. The grid makes them independent of order; the window level fixes the order instead.

    def _sum_rows(
        self,
        values: torch.Tensor,
        rows: torch.Tensor,
        count: int,
        name: str,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        level = self.config.consistency
        return ops.segment_sum(
            values, rows, count, level=level, out=out, bits=self.config.grid_bits, name=name
        )

    def _take_gradient(self, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The parameter's summed gradient of this rank; leaves none behind."""
        if not self.exact:
            gradient, parameter.grad = parameter.grad, None
            return torch.zeros_like(parameter) if gradient is None else gradient
        return take_grid(name, parameter)

    def _mean(self, sums: torch.Tensor, window: Window, name: str) -> torch.Tensor:
        """Sums over samples to the gradient of the mean loss per token of the global batch."""
        tokens = float(max(window.tokens, 1))
        if self.exact:
            return ops.from_grid(sums, tokens, self.config.grid_bits)
        finite = torch.isfinite(sums)
        if not bool(finite.all()):
            index = tuple((~finite).nonzero()[0].tolist())
            raise FloatingPointError(f"{name}: gradient sum at {index} is {float(sums[index])}")
        return sums / tokens

    def _travel(
        self, window: Window, values: torch.Tensor, send: list[int], receive: list[int]
    ) -> torch.Tensor:
        here = self.communicators.rank
        window.sent_bytes = (sum(send) - send[here]) * values.shape[1] * values.element_size()
        return self.communicators.communication.all_to_all(values, send, receive)

    def losses_of(self, window: Window) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample ids (B,) int64 and losses (B,) float32 of this rank, in the micro-batches' order."""
        ids = [part.sample_ids for part in window.micro_batches]
        return torch.cat(ids), torch.cat([window.losses[i] for i in range(len(ids))])


def take_grid(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The parameter's gradient sum on the grid; its grid is zero afterwards."""
    if parameter.grad is not None:
        raise TypeError(
            f"parameter {name} got an ordinary float32 gradient, whose sum depends on the batch's cut; "
            "batch consistency needs it from a module of tritonrec.nn, or use consistency='window'"
        )
    grid: torch.Tensor = parameter.grid  # type: ignore[attr-defined]
    sums = grid.clone()
    grid.zero_()
    return sums


def _index(micro_batch: int | None) -> int:
    assert micro_batch is not None
    return micro_batch
