"""Heartbeats of ranks in a store: where each is, and whether it has failed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

MAX_SHOWN = 3
"""Largest number of stages or ranks in a message."""


@dataclass(frozen=True)
class Report:
    """The last heartbeat of a rank.

    Args:
        number: of the report. time: in seconds since 1970, by the rank's clock.
        doing: stages of its threads, the oldest first. last: the last finished stage.
        calls: collectives begun, by group. task: tasks begun.
        failure: of this task, empty if there is none. lost: whether another rank caused the failure.
        still: ranks that it has found to stand still.
    """

    number: int = 0
    time: float = 0.0
    doing: tuple[str, ...] = ()
    last: str = ""
    calls: tuple[tuple[str, int], ...] = ()
    task: int = 0
    failure: str = ""
    lost: bool = False
    still: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        """The rank's stages, in words."""
        if self.doing:
            return "in " + ", ".join(self.doing[:MAX_SHOWN])
        return f"after {self.last}" if self.last else "before its first stage"

    @property
    def age(self) -> str:
        """Time since the report, in words; between machines as exact as their clocks."""
        return f"{max(0.0, time.time() - self.time):.1f} s ago"


def read_reports(store: dist.Store, ranks: Sequence[int]) -> dict[int, Report]:
    """The last report of each rank that has one."""
    found = {}
    for rank in ranks:
        key = key_of(rank)
        if store.check([key]):
            values: dict[str, Any] = json.loads(store.get(key))
            values["doing"] = tuple(values["doing"])
            values["calls"] = tuple(map(tuple, values["calls"]))
            found[rank] = Report(**values)
    return found


def key_of(rank: int) -> str:
    """The name of a rank's report in the store."""
    return f"report of rank {rank}"
