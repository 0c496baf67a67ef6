"""Windows: the batches of one update, how they are cut into micro-batches, and what their lookups count.

A window is a batch cut into N micro-batches, or A batches where gradients are accumulated: M = A * N. Rows
and dense parameters are frozen inside it, and updated once at its end (NestPipe, section V).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch

from .. import ops
from ..data import Batch
from ..settings import MOST, seed_setting, setting, typed
from .dist_plan import MAX_FIRST_USE
from .model_call import CallerSettings
from .precision import LossScaling, Precision
from .words import Words

Consistency = Literal["window", "batch"]
Dedup = Literal["none", "exchange", "lookup", "both"]
ExchangeSums = Literal["auto", "packed", "whole"]
FROZEN_WINDOW = 4
"""Micro-batches of a frozen window unless said otherwise."""
TAPER = 0.9
"""Of a window whose exchanges travel beside its computation, unless said otherwise (docs/scale.md)."""
Exchanges = Literal["auto", "once", "joined", "each"]


class Model(Protocol):
    """A model gives per-sample losses (B,) from a batch and, by feature, the rows of what it looks up."""

    def __call__(self, batch: Batch, rows: dict[str, torch.Tensor], seed: int) -> torch.Tensor: ...


@dataclass
class LookupCounts:
    """Keys and bytes of lookups on this rank; a task's, a step's, or a run's sum.

    A task may add a () tensor, for a number that only the device knows.

    Args:
        occurrences: ids that the samples look up.
        exchanged: keys sent to their owners, or to relays, this rank's own among them, after dedup before the
            exchange.
        received: keys that this owner received.
        read: rows read from the table, after dedup before the lookup.
        kept: rows that the last window's buffer handed on.
        written: rows written back to the table.
        lookups: table lookups made, one for each table that is not merged into another.
        rows: embeddings that left this rank, and gradients; in both steps, where lookups take two.
        key_bytes, row_bytes: what left this rank: keys, and embeddings and gradients together.
        embedding_bytes: of `row_bytes`, the embeddings.
        node_bytes: of `key_bytes` and `row_bytes`, what stayed in the node, of lookups in two steps.
        early: dense gradients that were reduced beside a backward.
    """

    occurrences: int = 0
    exchanged: int = 0
    received: int = 0
    read: int | torch.Tensor = 0
    kept: int | torch.Tensor = 0
    written: int | torch.Tensor = 0
    lookups: int = 0
    rows: int = 0
    key_bytes: int = 0
    row_bytes: int = 0
    embedding_bytes: int = 0
    node_bytes: int = 0
    early: int = 0

    def add(self, other: LookupCounts) -> None:
        """Add another's counts to these."""
        own = vars(self)
        for name, value in vars(other).items():
            if type(value) is not int or value:
                own[name] = own[name] + value


@dataclass(frozen=True)
class Window:
    """The batches of one update on this rank.

    Args:
        number: windows of this run counted from 0; its parity chooses the buffer.
        batches: one, or as many as gradients are accumulated over.
        update: updates of the rows and parameters before this one, over all runs.
        settings: of the thread that read the batches.
        words: what ranks compare of it; None for one rank.
    """

    number: int
    batches: list[Batch]
    update: int
    settings: CallerSettings = field(default_factory=CallerSettings)
    words: Words | None = None

    @property
    def step(self) -> int:
        """The training step of the last batch, counted from 0 over all runs."""
        return self.batches[-1].step

    @property
    def loss_terms(self) -> int:
        """Terms of the loss, this rank's samples together."""
        return sum(batch.loss_terms for batch in self.batches)


@typed
@dataclass(frozen=True)
class ExchangeConfig:
    """What the lookups of a window send, read and share: no bit changes, but by `precision`.

    docs/scale.md has figures of each.

    Args:
        dedup: where repeated keys are dropped: before the exchange, before the owner's lookup, at both places
            or at none (MTGRBoost, section 4.3).
        first_use: a row is sent once in a window, with the first micro-batch that uses it, and its gradient
            once, with the last.
        taper: a micro-batch's samples over those of its neighbour nearer to the middle of the window: nothing
            hides the exchanges at both ends. 0: `TAPER` where exchanges travel beside the computation and
            consistency is "batch", elsewhere 1.
        skip_fetch: rows that consecutive batches use stay in the buffers: they are neither fetched for the
            next batch nor written back while they stay. Needs two buffers (`Schedule.dual_buffer`).
        sharing: which micro-batches share an exchange. ``"once"``: rows come in one before the first
            micro-batch, gradients leave in one after the last. ``"joined"``: micro-batches share exchanges
            where that costs no overlap (`exchange_groups`). ``"each"``: each has its own, as in NestPipe.
            ``"auto"``: once where ranks are processes on the CPU of one machine, whose processors copy the
            messages; else each. Micro-batches that share both ways get a row once.
        sums: how gradient sums in fixed point are sent. ``"packed"``: each row in the bytes it needs, 4 to 5
            a value; the host of an accelerator waits to learn how many. ``"whole"``: in 8 bytes a value, and
            no host waits. ``"auto"``: packed where ranks compute on the CPUs of several machines, else whole.
        precision: of the rows that owners send: each is rounded once, also for the owner's own samples, and
            computed from as it was received (``QCommsConfig.forward_precision`` in TorchRec). Tables stay
            float32, and gradients are exchanged as they are.
    """

    dedup: Dedup = setting("both", "Drop repeated keys before the exchange, the lookup, or both.")
    first_use: bool = setting(False, "Send a row once a window, and its gradient once.")
    taper: float = setting(
        0.0, "Micro-batch over its neighbour nearer to the middle; 0: 0.9 over links, else 1.", 0, 1
    )
    skip_fetch: bool = setting(False, "Rows of consecutive batches stay in the buffers.")
    sharing: Exchanges = setting(
        "auto", "Exchanges of a window: once, shared by micro-batches, or each.", option="exchanges"
    )
    sums: ExchangeSums = setting(
        "auto", "Exact sums: packed, or 8 bytes a value and no wait.", option="exchange_sums"
    )
    precision: Precision = setting(
        "float32", "Of the rows that owners send; tables stay float32.", option="exchange_precision"
    )

    def __post_init__(self) -> None:
        if self.first_use and self.dedup not in ("exchange", "both"):
            raise ValueError(
                f"first_use sends a key once, so it needs dedup before the exchange, got {self.dedup!r}"
            )
        if self.skip_fetch and self.dedup not in ("lookup", "both"):
            raise ValueError(
                f"skip_fetch reads a row at most once: it needs dedup before the lookup, got {self.dedup!r}"
            )

    def once(self, copied: bool) -> bool:
        """Whether rows come and gradients leave once a window; `copied`: processors copy the messages."""
        return self.sharing == "once" or (self.sharing == "auto" and copied)


@typed
@dataclass(frozen=True)
class WindowConfig:
    """How a batch is cut and added up.

    Args:
        micro_batches: N; more micro-batches than samples leaves some empty, which is legal. 0:
            `FROZEN_WINDOW` where the schedule overlaps them, as in modes fwp and nestpipe, elsewhere 1.
        consistency: ``"batch"`` adds gradients in fixed point, so that the result does not depend on the
            cut; ``"window"`` adds in float32 in the order of the micro-batches.
        clustering: group samples that share keys (NestPipe, section V.C) instead of cutting in order.
        accumulate: batches of one update; their gradients are summed, by key and densely (MTGRBoost,
            section 5.2).
        depth: batches in flight, for pipelined modes; 0: as many as the schedule of the mode says. Each holds
            the samples and buffers of a batch.
        average_every: with several replicas of the tables, updates after which rows and optimizer states are
            averaged over them; each replica trains on its own samples in between (2D sparse parallelism).
            **Approximate.** 0: the replicas' gradients are added up in every update, which is exact.
        moment_scaling: of replicas that are averaged, with rows of Adagrad or row-wise Adagrad: the moment
            is taken over the number of replicas (`RowOptimizer.over_copies`).
        late_states: of the same rules: states are averaged one average later than the weights, as in the
            source, so that a replica's steps do not shrink by squares that its weights have not seen yet.
            `Trainer.sync` averages both.
        average_holders: of replicas that are averaged: a row's mean is over the replicas whose table has it;
            elsewhere over all, of which those that have not seen it yet count with its initial value.
        max_grad_norm: gradients are scaled down to this norm, of dense parameters and rows together, which
            has the same bits for any cut and any number of ranks; infinity measures it alone; 0: neither.
        max_grad_value: every value of a gradient is clamped to this size, before the norm; 0: none.
        skip_nonfinite: where a gradient or a loss is not finite, or has no exact sum, all ranks leave the
            update out, instead of an error (`StepResult.skipped`). On a GPU each update waits for it.
        precision: of the model's arithmetic: ``"bf16"`` and ``"fp16"`` call model and loss under
            `torch.autocast`, and the backward pass outside. Parameters, optimizers and tables stay float32.
            ``"fp16"`` scales the loss, and leaves out updates as `skip_nonfinite` does.
        loss_scaling: of precision ``"fp16"``.
        exchange: of lookups, for studies of it.
        fraction_bits: of gradient sums in fixed point.
        seed: of dropout.
        clustering_swaps: of clustered samples: swap them while that saves keys, as offline.
    """

    micro_batches: int = setting(0, "N, micro-batches per window; 0: 4 where they overlap.", 0, 65_536)
    consistency: Consistency = setting("batch", "batch: the bits of synchronous training.")
    clustering: bool = setting(False, "Group samples that share keys.")
    accumulate: int = setting(1, "Batches of one update.", 1, 65_536)
    depth: int = setting(0, "Batches in flight, for dbp and nestpipe; 0: the mode's own number.", 0, 1024)
    average_every: int = setting(
        0, "APPROXIMATE: average replicas every n updates and before a save or evaluation; 0: exact.", 0, MOST
    )
    moment_scaling: bool = setting(False, "Averaged replicas: Adagrad's moment over their number.")
    late_states: bool = setting(False, "Averaged replicas: Adagrad's sums one average after the weights.")
    average_holders: bool = setting(False, "Averaged replicas: a row's mean over those that have seen it.")
    max_grad_norm: float = setting(
        0.0, "Scale gradients down to this norm; inf: report it only; 0: neither.", 0, math.inf
    )
    max_grad_value: float = setting(0.0, "Clamp every gradient to this size; 0: none.", 0, math.inf)
    skip_nonfinite: bool = setting(False, "Leave out an update whose gradients are not finite.")
    precision: Precision = setting("float32", "Of the model's arithmetic; weights and tables stay float32.")
    loss_scaling: LossScaling = field(default_factory=LossScaling)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    fraction_bits: int = ops.FRACTION_BITS
    seed: int = seed_setting()
    clustering_swaps: bool = setting(False, "Clustered samples: swap them while that saves keys.")

    def __post_init__(self) -> None:
        if self.exchange.skip_fetch and self.depth == 1:
            raise ValueError("skip_fetch keeps rows for the next batch, which depth 1 does not read ahead")
        if self.clustering_swaps and not self.clustering:
            raise ValueError("clustering_swaps is of clustered samples: set clustering")
        for name in ("moment_scaling", "late_states", "average_holders"):
            if getattr(self, name) and not self.average_every:
                raise ValueError(f"{name} is of replicas that are averaged: set average_every")
        if self.precision == "fp16" and self.average_every:
            raise ValueError(
                "precision 'fp16' leaves an update out on all ranks together, and averaged replicas update "
                "on their own: use 'bf16', or exact replicas (average_every=0)"
            )
        if self.clips and self.average_every:
            raise ValueError("replicas that are averaged have gradients of their own: clip none of them")
        if self.exchange.first_use and self.window_micro_batches > MAX_FIRST_USE:
            raise ValueError(
                f"first_use takes at most {MAX_FIRST_USE} micro-batches in a window, "
                f"got {self.window_micro_batches}"
            )

    def cut(self, overlaps: bool, ranks: int, copied: bool) -> WindowConfig:
        """With a number of micro-batches and their taper, for a schedule that overlaps them or not.

        `copied`: messages are copies, made by the processors that compute (`Communicators.copies_messages`).
        """
        exchange = self.exchange
        # Float32 sums are the bits of one cut, which stays that of the modes that overlap nothing.
        beside = overlaps and ranks > 1 and self.consistency == "batch" and not exchange.once(copied)
        return replace(
            self,
            micro_batches=self.micro_batches or (FROZEN_WINDOW if overlaps else 1),
            exchange=replace(exchange, taper=exchange.taper or (TAPER if beside else 1.0)),
        )

    def averages_after(self, update: int) -> bool:
        """Whether replicas are averaged after this update, numbered from 0."""
        return self.average_every > 0 and (update + 1) % self.average_every == 0

    def check_pauses(self, every: int, name: str = "pause_every") -> None:
        """Raise ValueError where a run cannot pause after each so many steps; 0 stands for never."""
        if every < 0 or every % self.accumulate:
            raise ValueError(
                f"{name} must be 0 or a multiple of accumulate={self.accumulate}, got {every}: one "
                "update takes so many batches"
            )

    def adds_up_replicas(self, replicas: int) -> bool:
        """Whether gradients are added up over that many replicas of the tables in every update."""
        return replicas > 1 and not self.average_every

    @property
    def clips(self) -> bool:
        """Whether updates wait for the norm of all gradients: to limit, measure or leave them out."""
        return bool(self.max_grad_norm or self.max_grad_value or self.skips)

    @property
    def skips(self) -> bool:
        """Whether updates are left out whose gradients are not finite."""
        return self.skip_nonfinite or self.precision == "fp16"

    @property
    def window_micro_batches(self) -> int:
        """M, micro-batches of a window."""
        return self.micro_batches * self.accumulate
