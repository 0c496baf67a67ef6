"""The modes of a trainer: the schedule of each, and what each cannot do."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..distributed import Communicators
from .schedule import SCHEDULES, SEQUENTIAL, Schedule, keep_rows, with_replicas
from .window import WindowConfig

Mode = Literal["reference", "sequential", "dbp", "fwp", "nestpipe"]
PIPELINED: tuple[Mode, ...] = ("dbp", "fwp", "nestpipe")
MODES: dict[Mode, str] = {
    "reference": "reference: one process, whole batch, plain loop",
    "sequential": "micro-batches and ranks as in the pipelined modes, one stage after another",
    "dbp": "dual-buffer pipelining: lookups of later batches overlap with the current one",
    "fwp": "frozen-window pipelining: exchanges of a batch overlap with its computation",
    "nestpipe": "both, nested",
}


def schedule_of(mode: Mode, config: WindowConfig, replicas: int = 1) -> Schedule:
    """The table that a mode runs, in turn where it is ``sequential``; ``reference`` has none.

    Raises ValueError where the mode has no buffer in which ``config.skip_fetch`` could keep rows, and where
    it cannot have several batches in flight.
    """
    schedule = SEQUENTIAL if mode == "sequential" else SCHEDULES[mode]
    if config.skip_fetch:
        if mode not in ("dbp", "nestpipe"):
            raise ValueError(
                f"mode {mode!r} keeps no rows between batches: skip_fetch is for dbp and nestpipe"
            )
        schedule = keep_rows(schedule)
    if config.depth > 1 and mode not in ("dbp", "nestpipe"):
        raise ValueError(
            f"mode {mode!r} has one batch in flight, not {config.depth}: depth is for dbp and nestpipe"
        )
    if config.depth:
        schedule = replace(schedule, batches_in_flight=config.depth)
    return with_replicas(schedule) if replicas > 1 and not config.average_every else schedule


def demand_plain(config: WindowConfig, communicators: Communicators) -> None:
    """Raise ValueError for what one process with a plain loop does not do."""
    if communicators.world_size != 1 or config.micro_batches != 1:
        raise ValueError(
            f"mode 'reference' is one process with the whole batch; got {communicators.world_size} ranks "
            f"and {config.micro_batches} micro-batches; 'sequential' has those without overlap"
        )
    if config.consistency != "batch":
        raise ValueError("mode 'reference' is the reference of 'batch' consistency")
    if config.skip_fetch:
        raise ValueError("mode 'reference' keeps no rows between batches: skip_fetch is for dbp and nestpipe")
    if config.depth or config.average_every:
        raise ValueError("mode 'reference' has one batch in flight and one copy: no depth, no average_every")


def demand_fitting(schedule: Schedule, config: WindowConfig, replicas: int) -> None:
    """Raise ValueError for a schedule that goes with another configuration."""
    stages = {stage.name for stage in schedule.stages}
    exact_copies = replicas > 1 and not config.average_every
    if schedule.keeps_rows != config.skip_fetch or ("replica_reduce" in stages) != exact_copies:
        raise ValueError(
            f"schedule {schedule.name!r} keeps rows: {schedule.keeps_rows}, adds up "
            f"replicas: {'replica_reduce' in stages}; with skip_fetch={config.skip_fetch} and "
            f"{replicas} replicas it must be made by schedule_of or its parts"
        )
