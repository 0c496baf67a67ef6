"""A run beside its plan: ``tritonrec train --plan FILE``, a file of ``tritonrec plan CONFIG --json FILE``."""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...capacity import peak_bytes
from ...distributed import Communicators
from ...files.places import place_of, read_document
from ...settings import in_bytes
from ..progress import Pace
from ..train.config import flat, tables_of, to_toml
from ..train.run import Run, with_validation

MEMORY, TIME = 1.05, 1.15
"""Over what was planned, a run says so: what a plan is to hold, see docs/capacity.md."""
LOOK_SECONDS = 0.25
FIRST_LOOK = 64
"""Steps whose pace is looked at first; then after twice as many each time."""
OUTPUTS = {"trace", "log_dir", "json_lines", "log_every", "memory_limit", "publish", "warm_start", "changed",
           "spill"}  # fmt: skip
"""Settings that may be others than the plan's; of a checkpoint counts whether there is one."""


@dataclass(frozen=True)
class Planned:
    """Of a run: by rank the bytes at most, and rows, seconds of a step."""

    peaks: list[int]
    rows: int
    step_seconds: float


def settings_text(run: Run) -> str:
    """What a plan says that it is of."""
    return to_toml(tables_of(with_validation(run)))


def read_plan(path: Path, run: Run, world_size: int) -> Planned:
    """The plan of this run. Raises ValueError for another file, or one of other settings or ranks."""
    place = place_of(path)
    text = read_document(place, "plan")
    try:
        found = json.loads(text)
        planned = Planned(
            [int(rank["peak"]) for rank in found["ranks"]], int(found["rows"]), float(found["step_seconds"])
        )
        if not 0 < planned.step_seconds < math.inf or min([0, planned.rows, *planned.peaks]) < 0:
            raise ValueError(f"no run has {planned}")
        before = _settings(tomllib.loads(found["settings"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{place} is no plan of a run: tritonrec plan CONFIG --json FILE writes one"
        ) from error
    if len(planned.peaks) != world_size:
        raise ValueError(f"{place} is a plan for {len(planned.peaks)} ranks, and here are {world_size}")
    here = _settings(tables_of(with_validation(run)))
    for name in dict.fromkeys((*before, *here)):
        if before.get(name) != here.get(name):
            raise ValueError(
                f"{place} is the plan of another run: {name} is {before.get(name)!r} there, and "
                f"{here.get(name)!r} here"
            )
    return planned


def _settings(tables: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in flat(tables).items() if name.split(".")[-1] not in OUTPUTS}
    return found | ({"checkpoint": bool(found["checkpoint"])} if "checkpoint" in found else {})


class BesidePlan:
    """Says where this rank's run takes more than planned, and at its end what it took beside the plan.

    Args:
        pace: of the run. say: takes a warning.
    """

    def __init__(self, planned: Planned, rank: int, pace: Pace, say: Callable[[str], None]):
        self._planned, self._rank, self._pace, self._say = planned, rank, pace, say
        self._next_look, self._next_pace, self._memory_told = 0.0, FIRST_LOOK, False

    def on_step_end(self, steps: int) -> None:
        """Look, where it is time; this is the end of the `steps`-th step of this process."""
        planned = self._planned
        if not self._memory_told and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            if (peak := peak_bytes()) > MEMORY * planned.peaks[self._rank]:
                self._memory_told = True
                foretold = in_bytes(planned.peaks[self._rank])
                self._say(f"memory: {in_bytes(peak)} are taken, and {foretold} were planned")
        if steps < self._next_pace:
            return
        self._next_pace *= 2
        seconds = self._pace.seconds_per_step
        if seconds is not None and seconds > TIME * planned.step_seconds:
            foretold = f"{planned.step_seconds * 1e3:.1f}"
            self._say(f"time: a step takes {seconds * 1e3:.1f} ms, and {foretold} were planned")

    def outcome(self, communicators: Communicators, rows: int) -> dict[str, Any]:
        """What the run took and what was planned, of the rank whose memory exceeds most. Collective."""
        peaks = [int(text) for text in communicators.control.all_gather_texts(str(peak_bytes()))]
        peak, foretold = max(zip(peaks, self._planned.peaks, strict=True), key=lambda both: both[0] / both[1])
        return {
            "peak": peak, "peak_planned": foretold, "rows": rows, "rows_planned": self._planned.rows,
            "seconds_per_step": self._pace.seconds_per_step,
            "seconds_per_step_planned": self._planned.step_seconds,
        }  # fmt: skip


def beside_plan_line(found: Mapping[str, Any]) -> str:
    """Of `BesidePlan.outcome`."""
    seconds, planned = found["seconds_per_step"], found["seconds_per_step_planned"]
    pace = "too few steps to time" if seconds is None else (
        f"{seconds * 1e3:.1f} ms a step of {planned * 1e3:.1f} ({seconds / planned:.2f})"
    )  # fmt: skip
    return (
        f"beside its plan: {in_bytes(found['peak'])} of {in_bytes(found['peak_planned'])} "
        f"({found['peak'] / found['peak_planned']:.2f}) at most on a rank, {found['rows']:,} rows of "
        f"{found['rows_planned']:,}, {pace}"
    )
