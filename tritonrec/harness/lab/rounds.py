"""Runs every setting in interleaved rounds over rate-limited links, compares losses, then measures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import TimeElapsedColumn

from ...distributed import TIMEOUT, RankPool
from ...distributed.groups import validate_division
from ...files import ScratchFolder
from ...nn import HSTUConfig
from ...pipeline import PIPELINED, Mode, schedule_of
from ...settings import MOST
from ...settings import setting as user_setting
from ...trace import read
from ...trace.timeline import draw
from ..job import Job
from ..network import PREFIX, Enter, LabError, Network, built, clean, require_tools
from ..progress import CommandProgress
from .figures import WARMUP, Figures, StageCost, figures, medians, stage_costs
from .run import TOLERANCE, LabRun, compare_losses, run_once
from .settings import BASELINE, Setting, lookup_stages, settings

PROBES = 2
"""Runs that find the communication time: the second with the stages already slowed by the first's."""


@dataclass(frozen=True)
class LabConfig:
    """The runs of a lab.

    Args:
        job: data, model and batches. ranks: world size. rate: Mbit/s of each link, each way.
        modes, micro_batches, switches: see `settings`.
        seconds: emulated stages, seconds per step. proportions: shares of ``lookup`` and ``communication`` in
            a sequential step; the seconds are then found from the real communication. Empty: nothing.
        steps: steps of a run, `WARMUP` of them not measured. rounds: runs of each setting.
        nodes: machines of as many ranks each, with one link; 0: one for each rank.
    """

    job: Job
    ranks: int = user_setting(4, "Ranks, each in a network namespace.", 2, 1024, option="world_size")
    rate: float = user_setting(100.0, "Mbit/s of each rank's link, each way.", 0.1, 100_000)
    modes: Sequence[Mode] = PIPELINED
    micro_batches: tuple[int, ...] = user_setting((4, 8), "Values of N; dbp runs whole batches.")
    switches: Mapping[str, object] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    proportions: Mapping[str, float] = field(default_factory=dict)
    steps: int = user_setting(8, "Steps of a run, at least 4; two of them warm up.", 1, MOST)
    rounds: int = user_setting(3, "Interleaved runs of each setting.", 1, 10_000)
    nodes: int = user_setting(0, "Machines of as many ranks each behind one link; 0: one a rank.", 0, 1024)

    def __post_init__(self) -> None:
        if self.steps < WARMUP + 2:
            raise LabError(f"a lab run takes at least {WARMUP + 2} steps, {WARMUP} of them to warm up")
        if self.seconds and self.proportions:
            raise LabError("--emulate gives the seconds that --proportions would find: give one of them")
        for setting in self.settings:  # a wrong switch is an error before anything is created
            window = setting.window(self.job.seed)
            try:
                validate_division(self.ranks, setting.replicas, setting.nodes)
                schedule_of(setting.mode, window, setting.replicas, setting.nodes)
            except ValueError as error:
                raise LabError(f"{setting}: {error}") from error
            every = window.average_every
            if every and (left := (self.steps - WARMUP) % every):
                raise LabError(
                    f"{setting}: the steps measured, all but {WARMUP}, hold no whole number of averages: "
                    f"--steps {self.steps + every - left}"
                )

    @property
    def settings(self) -> list[Setting]:
        """Rows of the report, the baseline first."""
        return settings(self.modes, self.micro_batches, self.switches)


DATA = "zipf:users=8000,items=40000,median_length=40,seed=1"
PLAN = LabConfig(Job(DATA, batch_size=256, num_negatives=2, sizes=HSTUConfig(dim=32, layers=1, dropout=0.0)))
"""What `tritonrec lab` runs by default."""


@dataclass(frozen=True)
class Measurement:
    """Results of one run."""

    figures: Figures
    costs: dict[str, StageCost]
    losses: str
    tasks: int
    overruns: int


@dataclass(frozen=True)
class Row:
    """Measurements of one setting over all rounds.

    Attributes:
        figures: medians over the rounds.
        ratios: step time of the baseline over this one's, by round.
        losses: how they agree with the baseline's.
        costs: by stage, of the last round.
        tasks, overruns: emulated tasks, and those whose real work took longer.
    """

    setting: Setting
    figures: Figures
    ratios: list[float]
    losses: str
    costs: dict[str, StageCost]
    tasks: int
    overruns: int


@dataclass(frozen=True)
class Result:
    """A lab's outcome; `seconds` are the emulated stages', per step."""

    plan: LabConfig
    rows: list[Row]
    seconds: dict[str, float]


@contextmanager
def ranks_in(network: Network, timeout: timedelta = TIMEOUT, meshes: Iterable[tuple[int, int]] = ((1, 1),)):
    """A `RankPool` whose ranks live in the network's namespaces, built before and removed after.

    Args:
        meshes: replicas and nodes of the runs on the pool.
    """
    require_tools()
    whole = [(network.ranks, *each) for each in meshes]
    with built(network), RankPool(whole, timeout, Enter(network)) as pool:
        yield pool


def run_lab(
    plan: LabConfig, console: Console, traces: Path | None = None, timeout: timedelta = TIMEOUT
) -> Result:
    """Build the network, run, take it down; a figure is made only of a run whose losses are right.

    Args:
        traces: directory for a trace and a picture of each setting's last round.

    Raises:
        LabError: the lab cannot be built here, losses differ, an edge of a schedule was not honoured, or a
            stage is slower than what it stands for.
    """
    network = Network(plan.ranks, plan.rate, os.getpid(), plan.nodes)
    meshes = {(setting.replicas, setting.nodes) for setting in plan.settings}
    require_tools()
    if traces:
        traces.mkdir(parents=True, exist_ok=True)
    kept = nullcontext(str(traces)) if traces else ScratchFolder("tritonrec-lab-")
    with kept as folder, ranks_in(network, timeout, meshes) as pool, _progress(console) as progress:
        bar = progress.add_task(
            "starting ranks", total=1 + PROBES * bool(plan.proportions) + len(plan.settings) * plan.rounds
        )

        def run(note: str, setting: Setting, seconds: Mapping[str, float], steps: int) -> LabRun:
            progress.update(bar, description=f"{note}: {setting}")
            path = trace_of(setting, folder)
            done = run_once(pool, plan.ranks, plan.job, setting, seconds, steps, path)
            progress.advance(bar)
            return done

        run("warming up", BASELINE, {}, 2)  # compiles what no cache holds yet
        seconds = dict(plan.seconds)
        for _ in range(PROBES if plan.proportions else 0):
            seconds = _proportional(measure(run("probing", BASELINE, seconds, plan.steps), plan), plan)
        rounds: list[list[Measurement]] = []
        reference: LabRun | None = None
        for number in range(plan.rounds):
            rounds.append([])
            for setting in plan.settings:
                done = run(f"round {number + 1} of {plan.rounds}", setting, seconds, plan.steps)
                reference = reference or done
                rounds[-1].append(measure(done, plan, reference))
        if traces:
            for path in (trace_of(setting, folder) for setting in plan.settings):
                draw(read(path), path.with_suffix(".png"))
    return Result(plan, rows(plan, rounds), seconds)


def trace_of(setting: Setting, folder: str) -> Path:
    """Where a setting's trace goes."""
    return Path(folder, f"{str(setting).replace(' ', '_')}.pftrace")


def clean_up(console: Console) -> None:
    """``--clean``: remove what labs left behind, and say what."""
    require_tools()
    gone, kept = clean()
    owners = sorted({name.removeprefix(f"{PREFIX}-").partition("-")[0] for name in kept})
    console.print(f"removed {len(gone)} network namespaces of labs that are gone", highlight=False)
    if owners:
        console.print(f"left alone: labs of the running processes {', '.join(owners)}", highlight=False)


def measure(run: LabRun, plan: LabConfig, reference: LabRun | None = None) -> Measurement:
    """Compare the losses of a run with the reference's, then measure it."""
    exact = run.setting.window(plan.job.seed).consistency == "batch"
    tolerance = float("inf") if run.setting.approximate else 0.0 if exact else TOLERANCE
    losses = compare_losses(run, reference or run, tolerance)
    costs = stage_costs(read(run.trace).spans)
    return Measurement(figures(run), costs, losses, run.tasks, run.overruns)


def rows(plan: LabConfig, rounds: Sequence[Sequence[Measurement]]) -> list[Row]:
    """Medians over the rounds; each ratio is of two runs of the same round."""
    found = []
    for place, setting in enumerate(plan.settings):
        own = [one[place] for one in rounds]
        pace = "mean_step" if setting.approximate else "step"
        ratios = [getattr(one[0].figures, pace) / getattr(one[place].figures, pace) for one in rounds]
        found.append(
            Row(
                setting,
                medians([each.figures for each in own]),
                ratios,
                own[-1].losses,
                own[-1].costs,
                sum(each.tasks for each in own),
                sum(each.overruns for each in own),
            )
        )
    return found


def _proportional(probe: Measurement, plan: LabConfig) -> dict[str, float]:
    """Seconds of the emulated stages, such that the probe's real communication has its share of a step."""
    seen, shares = probe.figures, plan.proportions
    step = seen.communication / shares["communication"]
    lookup = step * shares["lookup"]
    stage = probe.costs["compute"]
    rest = seen.step - seen.lookup - seen.communication - stage.tasks * stage.seconds  # updates, write-back
    compute = step - lookup - seen.communication - rest
    if compute <= 0:
        raise LabError(
            f"at {plan.rate:g} Mbit/s a step communicates for {seen.communication * 1e3:.0f} ms, and updates "
            f"alone take {rest * 1e3:.0f} ms: too much for these proportions. Lower --rate"
        )
    return {**lookup_stages(lookup), "compute": compute}


def _progress(console: Console) -> CommandProgress:
    return CommandProgress(console, TimeElapsedColumn())
