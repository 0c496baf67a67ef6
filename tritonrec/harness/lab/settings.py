"""What a lab runs: modes, micro-batches, switches of the window, and stages that are slowed on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...pipeline import NESTPIPE, Mode, Program, WindowConfig, WindowPlaces, base_schedule
from ...pipeline.early import EarlyDense
from ...pipeline.places import Dense, Samples
from ...settings import values_by_option, with_values
from ..network import LabError

LOOKUP_SHARES = {"prefetch": 1 / 6, "h2d": 1 / 6, "route": 1 / 6, "retrieve": 1 / 2}
"""How ``lookup=`` is shared out: the owner's table is the slowest of the four stages."""

PAPER = {"lookup": 0.496, "communication": 0.208}
"""Shares of TorchRec's step at 1,536 workers (NestPipe, Table II): 2870.99 and 1207.85 of 5793.83 ms."""


REPLICAS = "replicas"
"""The switch that is no field of `WindowConfig`: ranks that hold the same part of the tables (2D)."""

NODES = "nodes"
"""Another one: the nodes over which lookups go in two steps (`Communicators.over`)."""

AVERAGE = "average_every"
"""The switch that makes copies of the tables approximate."""


@dataclass(frozen=True)
class Setting:
    """One row of the report; `switches` are fields of `WindowConfig`, `REPLICAS` and `NODES`."""

    mode: Mode
    micro_batches: int = 1
    switches: Mapping[str, Any] = field(default_factory=dict)

    def window(self, seed: int) -> WindowConfig:
        """How it cuts its batches; a ValueError of the configuration becomes a `LabError` naming the row."""
        chosen = {name: value for name, value in self.switches.items() if name not in (REPLICAS, NODES)}
        try:
            own = {"micro_batches": self.micro_batches, "seed": seed, "exchanges": "each"}  # as simulated
            window = with_values(WindowConfig(), {**own, **chosen})
        except ValueError as error:
            raise LabError(f"{self}: {error}") from error
        if window.accumulate > 1:  # the baseline's losses are others, and its steps half as long
            raise LabError(f"{self}: a step of a lab is one update of one batch: leave out accumulate")
        if window.average_every and self.replicas == 1:
            raise LabError(f"{self}: there is one copy of the tables: say replicas=2 as well")
        if self.replicas > 1 and window.exchange.dedup not in ("lookup", "both"):
            raise LabError(f"{self}: replicas need dedup before the lookup: lookup or both")
        return window

    def taper(self, ranks: int) -> float:
        """Of its windows, where so many ranks have links between them."""
        overlaps = base_schedule(self.mode).overlaps_window
        return self.window(0).cut(overlaps, ranks // self.replicas, copied=False).exchange.taper

    def __str__(self) -> str:
        return " ".join([f"{self.mode} N={self.micro_batches}", *self.switch_words])

    @property
    def label(self) -> str:
        """Mode and `words`."""
        return " ".join([self.mode, *self.words])

    @property
    def words(self) -> list[str]:
        """The switches, and whether the result is approximate."""
        return [*self.switch_words, *(["APPROXIMATE"] if self.approximate else [])]

    @property
    def approximate(self) -> bool:
        """Whether the copies of the tables drift apart between averages."""
        return bool(self.switches.get(AVERAGE, 0))

    @property
    def replicas(self) -> int:
        """Ranks that hold the same part of the tables."""
        return int(self.switches.get(REPLICAS, 1))

    @property
    def nodes(self) -> int:
        """Nodes over which lookups go in two steps; 1: in one step."""
        return int(self.switches.get(NODES, 1))

    @property
    def switch_words(self) -> list[str]:
        """``clustering``, ``dedup=none``: the switches as they are typed."""
        return [name if value is True else f"{name}={value}" for name, value in self.switches.items()]


BASELINE = Setting("sequential")
"""Synchronous training: whole batches, one stage after another."""


def settings(
    modes: Iterable[Mode], micro_batches: Iterable[int], switches: Mapping[str, Any]
) -> list[Setting]:
    """The baseline, then every mode. Without overlap inside a batch (``dbp``) whole batches are best: N = 1.

    With `switches`, nestpipe runs at each N once more with all of them; with approximate ones, the exact
    ones beside them.
    """
    chosen, counts = [BASELINE], list(micro_batches)
    for mode in modes:
        schedule = base_schedule(mode)
        serial_window = schedule.concurrent and not schedule.overlaps_window
        chosen += [Setting(mode, count) for count in ([1] if serial_window else counts)]
    if switches.get(AVERAGE):
        exact = {name: value for name, value in switches.items() if name != AVERAGE}
        chosen += [Setting("nestpipe", count, exact) for count in counts]
    if switches:
        chosen += [Setting("nestpipe", count, switches) for count in counts]
    return [setting for place, setting in enumerate(chosen) if setting not in chosen[:place]]


def parse_switches(words: Iterable[str]) -> dict[str, Any]:
    """Switches from ``name`` or ``name=value``; a LabError lists them for an unknown one."""
    known = values_by_option(plain := WindowConfig())
    for own in ("micro_batches", "seed", *values_by_option(plain.loss_scaling)):  # options of their own
        known.pop(own)
    known[REPLICAS] = known[NODES] = 1
    chosen = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known:
            raise LabError(f"--switch {word!r}: unknown; the switches are {', '.join(sorted(known))}")
        chosen[name] = _value(word, value.strip() if equals else "true", known[name])
    return chosen


def _value(word: str, text: str, default: Any) -> Any:
    kinds = {bool: "true or false", int: "a whole number", float: "a number"}
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return type(default)(text)
    except (KeyError, ValueError):
        raise LabError(f"--switch {word!r} takes {kinds[type(default)]}") from None


def parse_emulation(text: str) -> dict[str, float]:
    """Seconds per step by stage from ``lookup=20,compute=50`` (milliseconds; ``ms`` may be written)."""
    stages = {stage.name for stage in NESTPIPE.stages}
    seconds: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name != "lookup" and name not in stages:
            raise LabError(
                f"--emulate {part!r}: no such stage; known are lookup, {', '.join(sorted(stages))}"
            )
        try:
            amount = float(value.removesuffix("ms")) / 1e3
        except ValueError:
            amount = -1.0
        if not 0 < amount < 3600:
            raise LabError(f"--emulate {part!r} takes milliseconds, as in {name}=20")
        seconds.update(lookup_stages(amount) if name == "lookup" else {name: amount})
    if text and not seconds:
        raise LabError(f"--emulate {text!r} names no stage")
    return seconds


def lookup_stages(seconds: float) -> dict[str, float]:
    """Seconds of each lookup stage."""
    return {stage: share * seconds for stage, share in LOOKUP_SHARES.items()}


def parse_proportions(text: str) -> dict[str, float]:
    """Shares of a sequential step from ``paper`` or ``LOOKUP,COMMUNICATION`` in percent."""
    if text == "paper":
        return PAPER
    try:
        lookup, communication = (float(part) / 100 for part in text.split(","))
    except ValueError:
        lookup = communication = -1.0
    if min(lookup, communication) <= 0 or lookup + communication >= 1:
        raise LabError(
            f"--proportions takes paper, or percent of lookup and communication as in 49.6,20.8; got {text!r}"
        )
    return {"lookup": lookup, "communication": communication}


class Emulation:
    """Stages that take at least a given time: the real work is done, the rest of the time is slept.

    A stage of micro-batches gets its seconds by their share of the rank's samples.

    Args:
        seconds: stage -> seconds per step.

    Attributes:
        tasks: emulated tasks run, and `overruns`, those whose real work took longer than that.
    """

    def __init__(self, seconds: Mapping[str, float]):
        self.seconds = seconds
        self.tasks = self.overruns = 0
        # When the `compute` under way began, its seconds, and `EarlyDense.shares`.
        self._computing: tuple[float, float, Iterator[float]] = 0.0, 0.0, iter(())

    def install(self, program: Program) -> None:
        """Slow the program's stages."""
        early = program.run_places[Dense].flight.early
        for stage, seconds in self.seconds.items():
            program.actions[stage] = self._slowed(stage, program.actions[stage], seconds, early)
        early.completed = self._late(early.completed)

    def _late(self, completed: Callable[[], None]) -> Callable[[], None]:
        """A backward has two thirds of the time of `compute`, which its parameters share by their sizes."""

        def late() -> None:
            began, seconds, shares = self._computing
            time.sleep(max(0.0, began + seconds * (1 - next(shares) * 2 / 3) - time.perf_counter()))
            completed()

        return late

    def _slowed(self, stage: str, action: Any, seconds: float, early: EarlyDense) -> Any:
        def slowed(places: WindowPlaces, micro_batch: int | None = None) -> None:
            began, whole = time.perf_counter(), seconds * share(places, micro_batch)
            if stage == "compute":
                self._computing = began, whole, iter(early.shares)
            action(places, micro_batch)
            left = began + whole - time.perf_counter()
            self.tasks += 1
            if left > 0:
                time.sleep(left)
            else:
                self.overruns += 1

        return slowed


def share(places: WindowPlaces, micro_batch: int | None) -> float:
    """The part of a window's samples in one micro-batch; 1 for a stage that runs once a batch."""
    if micro_batch is None:
        return 1.0
    samples = [part.num_samples for part in places[Samples]]
    return samples[micro_batch] / sum(samples) if sum(samples) else 1 / len(samples)
