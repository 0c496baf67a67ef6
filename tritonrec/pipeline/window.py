"""What a window is, and what its stages share.

    W world size   M micro-batches   U_i keys asked for by micro-batch i   K rows of this shard in the window

A window is a batch cut into N micro-batches, or A batches where gradients are accumulated: M = A * N. Rows
and dense parameters are frozen inside it, and updated once at its end (NestPipe, section V).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from .. import ops
from ..data import Batch

Consistency = Literal["window", "batch"]
Dedup = Literal["none", "exchange", "lookup", "both"]


class Model(Protocol):
    """A model gives per-sample losses (B,) from a batch and, by feature, the rows of what it looks up."""

    def __call__(self, batch: Batch, rows: dict[str, torch.Tensor], seed: int) -> torch.Tensor: ...


def _no_keys() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass
class TableWindow:
    """What the stages of one window share about one table."""

    # routing, as the rank that asks: keys of each micro-batch grouped by owner
    inverse: list[torch.Tensor] = field(default_factory=list)  # occurrence -> row of the exchanged embeddings
    send: list[list[int]] = field(default_factory=list)  # [i][r]: keys of micro-batch i owned by rank r
    # routing, as the owner
    receive: list[list[int]] = field(default_factory=list)  # [i][r]: keys that rank r asks of this one
    received_keys: torch.Tensor = field(default_factory=_no_keys)
    # retrieval
    keys: torch.Tensor = field(default_factory=_no_keys)  # (K,) distinct
    admitted: torch.Tensor | None = None  # (k,) buffer rows whose keys have a row; None: all
    cold: torch.Tensor | None = None  # (K,) bool, rows kept in half precision; None: none
    wanted: list[torch.Tensor] = field(default_factory=list)  # [i]: buffer rows asked for, by source rank
    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))  # (K, row width)
    # the window
    embeddings: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    row_gradient: torch.Tensor | None = None  # (K, dim), fp32 or on the grid


@dataclass
class LookupCounts:
    """Keys and bytes of lookups on this rank; a step's, or a run's sum.

    Args:
        occurrences: ids that the samples look up.
        exchanged: keys sent to their owners, this rank's own among them, after dedup before the exchange.
        received: keys that this owner was asked for.
        read: rows read from the table, after dedup before the lookup.
        lookups: table lookups made, one for each table that is not merged into another.
        key_bytes, row_bytes: what left this rank: keys, and embeddings and gradients together.
    """

    occurrences: int = 0
    exchanged: int = 0
    received: int = 0
    read: int = 0
    lookups: int = 0
    key_bytes: int = 0
    row_bytes: int = 0

    def add(self, other: LookupCounts) -> None:
        """Add another's counts to these."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Window:
    """Everything the stages of one window share; made before `prefetch`, dropped after `write_back`."""

    number: int  # windows of this run counted from 0; its parity chooses the buffer
    batches: list[Batch]  # one, or as many as gradients are accumulated over
    update: int  # updates of the rows and parameters before this one, over all runs
    micro_batches: list[Batch] = field(default_factory=list)
    tables: list[TableWindow] = field(default_factory=list)
    terms: int = 0  # of the loss, every rank's samples together
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: LookupCounts = field(default_factory=LookupCounts)
    sent_bytes: int = 0

    @property
    def step(self) -> int:
        """The training step of the last batch, counted from 0 over all runs."""
        return self.batches[-1].step

    @property
    def keys(self) -> int:
        """Distinct keys of this shard."""
        return sum(len(table.keys) for table in self.tables)


@dataclass(frozen=True)
class WindowConfig:
    """How a batch is cut and added up.

    Args:
        micro_batches: N; more micro-batches than samples leaves some empty, which is legal.
        consistency: ``"batch"`` adds gradients on the int64 grid, so that the result does not depend on the
            cut; ``"window"`` adds in float32 in the order of the micro-batches.
        clustering: group samples that share keys (NestPipe, section V.C) instead of cutting in order.
        accumulate: batches of one update; their gradients are summed, by key and densely (MTGRBoost,
            section 5.2).
        dedup: where repeated keys are dropped: before the exchange, before the owner's lookup, at both places
            or at none (MTGRBoost, section 4.3).
        grid_bits: grid of 2**-grid_bits for gradient sums.
        seed: of dropout.
    """

    micro_batches: int = 1
    consistency: Consistency = "batch"
    clustering: bool = False
    accumulate: int = 1
    dedup: Dedup = "both"
    grid_bits: int = ops.GRID_BITS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"a batch has at least one micro-batch, got {self.micro_batches}")
        if self.consistency not in ("window", "batch"):
            raise ValueError(f"consistency must be 'window' or 'batch', got {self.consistency!r}")
        if self.accumulate < 1:
            raise ValueError(f"gradients are accumulated over at least one batch, got {self.accumulate}")
        if self.dedup not in ("none", "exchange", "lookup", "both"):
            raise ValueError(f"dedup must be none, exchange, lookup or both, got {self.dedup!r}")

    @property
    def window_micro_batches(self) -> int:
        """M, micro-batches of a window."""
        return self.micro_batches * self.accumulate
