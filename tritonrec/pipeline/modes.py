"""The modes of a trainer: the schedule of each, whose properties say what the mode can do."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from ..distributed import Communicators
from ..distributed.groups import NO_REPLICAS
from .schedule import (
    SCHEDULES,
    SEQUENTIAL,
    Schedule,
    keep_rows,
    over_nodes,
    with_early_dense,
    with_norm,
    with_replicas,
    with_window_loss,
)
from .window import WindowConfig

Mode = Literal["reference", "sequential", "dbp", "fwp", "nestpipe"]
MODES: dict[Mode, str] = {
    "reference": "reference: one process, whole batch, plain loop",
    "sequential": "micro-batches and ranks as in the pipelined modes, one stage after another",
    "dbp": "dual-buffer pipelining: lookups of later batches overlap with the current one",
    "fwp": "frozen-window pipelining: exchanges of a batch overlap with its computation",
    "nestpipe": "both, nested",
}
PIPELINED: tuple[Mode, ...] = tuple(mode for mode in get_args(Mode) if mode in SCHEDULES)
"""Modes whose stages overlap."""
STAGED: tuple[Mode, ...] = ("sequential", *PIPELINED)
"""Modes that run stages; ``reference`` is a plain loop."""
TWO_BUFFERS: tuple[Mode, ...] = tuple(mode for mode in PIPELINED if SCHEDULES[mode].dual_buffer)
"""Modes that can keep rows between batches."""


def base_schedule(mode: Mode) -> Schedule:
    """The schedule of a mode with stages, before any switch."""
    return SCHEDULES.get(mode, SEQUENTIAL)


def schedule_of(
    mode: Mode,
    config: WindowConfig,
    replicas: int = 1,
    nodes: int = 1,
    sees_window: bool = False,
    early: int = 0,
) -> Schedule:
    """The schedule of a mode with the switches of `config`; ``reference`` has none.

    `sees_window`: of a model with a `window_loss`. `early`: buckets of dense gradients that may be
    reduced beside backward.

    Raises ValueError where the mode has no buffer in which ``skip_fetch`` could keep rows, where it cannot
    have several batches in flight, and where lookups over nodes do not go with the rest.
    """
    schedule = base_schedule(mode)
    able = " and ".join(TWO_BUFFERS)
    if config.exchange.skip_fetch:
        if not schedule.dual_buffer:
            raise ValueError(f"mode {mode!r} keeps no rows between batches: skip_fetch is for {able}")
        schedule = keep_rows(schedule)
    if config.depth > 1 and not schedule.overlaps_batches:
        raise ValueError(f"mode {mode!r} has one batch in flight, not {config.depth}: depth is for {able}")
    if config.depth:
        schedule = replace(schedule, batches_in_flight=config.depth)
    if sees_window:
        if config.average_every:
            raise ValueError(
                "replicas that are averaged train on their own samples, and a window_loss is of the whole "
                "global batch: use exact replicas (average_every=0)"
            )
        schedule = with_window_loss(schedule)
    if config.adds_up_replicas(replicas):
        schedule = with_replicas(schedule)
    if nodes > 1:
        if config.consistency != "batch":
            raise ValueError(
                f"{nodes} nodes add gradients up within a node first: float32 sums, of consistency "
                f"{config.consistency!r}, would have other bits; use 'batch', or nodes=1"
            )
        if config.exchange.dedup not in ("exchange", "both"):
            raise ValueError(
                f"{nodes} nodes send a key once from each, so they need dedup before the exchange, got "
                f"{config.exchange.dedup!r}"
            )
        if replicas > 1:
            raise ValueError(f"{replicas} replicas of the tables and {nodes} nodes: {NO_REPLICAS}")
        schedule = over_nodes(schedule)
    if early and schedule.overlaps_window and not sees_window and config.window_micro_batches > 1:
        schedule = with_early_dense(schedule, early)
    return with_norm(schedule) if config.clips else schedule


def validate_reference(config: WindowConfig, communicators: Communicators) -> None:
    """Raise ValueError for what one process with a plain loop does not do."""
    if communicators.world_size != 1 or config.micro_batches != 1:
        raise ValueError(
            f"mode 'reference' is one process with the whole batch; got {communicators.world_size} ranks "
            f"and {config.micro_batches} micro-batches; 'sequential' has those without overlap"
        )
    if config.consistency != "batch":
        raise ValueError("mode 'reference' is the reference of 'batch' consistency")
    if config.exchange.skip_fetch:
        able = " and ".join(TWO_BUFFERS)
        raise ValueError(f"mode 'reference' keeps no rows between batches: skip_fetch is for {able}")
    if config.depth or config.average_every:
        raise ValueError("mode 'reference' has one batch in flight and one copy: no depth, no average_every")


def validate_schedule(
    schedule: Schedule, config: WindowConfig, replicas: int, nodes: int, sees_window: bool = False
) -> None:
    """Raise ValueError for a schedule that goes with another configuration."""
    fits = schedule.keeps_rows == config.exchange.skip_fetch and schedule.clips == config.clips
    fits &= schedule.relays == (nodes > 1) and schedule.sees_window == sees_window
    if not fits or schedule.replicated != config.adds_up_replicas(replicas):
        raise ValueError(
            f"schedule {schedule.name!r} keeps rows: {schedule.keeps_rows}, adds up replicas: "
            f"{schedule.replicated}, clips: {schedule.clips}, relays: {schedule.relays}, sees_window: "
            f"{schedule.sees_window}; with skip_fetch={config.exchange.skip_fetch}, {replicas} replicas, "
            f"{nodes} nodes, limits of gradients: {config.clips} and a model with a window_loss: "
            f"{sees_window} it must be made by schedule_of or its parts"
        )
