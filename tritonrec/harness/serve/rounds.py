"""`tritonrec serve-bench`: inference with a bounded lag beside the synchronous one, interleaved.

The experiments of arXiv 2512.19342, section V and VI, on ranks of this machine. Delays are real sleeps,
drawn anew each round and the same for all settings of a round; settings are interleaved, and a saving is a
difference of two runs of one round.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import TimeElapsedColumn

from ...distributed import TIMEOUT, RankPool
from ...files import ScratchFolder
from ...settings import MOST, MOST_SEED, setting, typed
from ...slipstream.threshold import t_quantile
from ..network import Enter, Network, built, require_tools
from ..progress import CommandProgress
from .collectives import counts_of_ranks, of_ranks, time_counts, time_size
from .mpi import Cells, available, run_with_mpi
from .run import ServeRun, serve
from .served import Served, export_checkpoint

SCENARIOS = ("delays", "balanced", "straggler", "sizes")
BACKENDS = ("gloo", "bls")
WARM_UP = 5
LARGEST = 16 * 2**20
"""Bytes to each rank of the largest all-to-all; 64 MB from each of four ranks."""


@typed
@dataclass(frozen=True)
class ServeConfig:
    """The settings of a comparison.

    Args:
        world_size: ranks, at least 2. bounds: values of k; 0, the reference, is always among them.
        scenarios: some of `SCENARIOS`. delay: longest random delay in seconds; the straggler sleeps for half
            of it in every step.
        steps, rounds: batches of a run, and runs of each setting; intervals need two rounds.
        batch_size: samples of all ranks together.
        table_rows, dim, data: of `Served`. checkpoint: directory of `tritonrec train --model dlrm`, whose
            tables, weights and, by default, clicks are served; then `table_rows` and `dim` are its own.
        sizes: bytes to each rank of the plain all-to-alls; none to leave them out.
        rate: of links between hosts of one rank each, as in `tritonrec lab`; 0: ranks of one machine.
        repetitions: most all-to-alls in a row (Fig. 6b); 0 to leave them out.

    Raises ValueError naming the setting that is out of range.
    """

    world_size: int = setting(4, "Ranks.", 2, 1024)
    bounds: tuple[int, ...] = setting(
        (0, 1, 2, 4, 8), "Bounds k, separated by commas; 0 is always run.", 0, 1024
    )
    scenarios: tuple[str, ...] = SCENARIOS
    delay: float = 0.01
    steps: int = setting(60, "Batches of a run.", 1, MOST)
    compute: float = setting(0.0, "Emulated computation of each batch on each rank, in ms.", 0, 1000)
    rounds: int = setting(5, "Interleaved runs of each setting.", 2, 10_000)
    batch_size: int = setting(64, "Samples of all ranks together.", 2, 2**24)
    table_rows: int = setting(
        26_000, "Rows of the 26 tables together, about, in Criteo's proportions.", 1024, 2**40
    )
    dim: int = setting(16, "Columns of a row.", 1, 2**16)
    data: str = setting("", "Clicks to serve, as of tritonrec train; by default synthetic ones.")
    checkpoint: Path | None = None
    sizes: tuple[int, ...] = tuple(4**power for power in range(13))
    repetitions: int = setting(
        0, "Most all-to-alls in a row, each of 32 KiB from a rank; none with 0.", 0, 10**7
    )
    rate: float = setting(0.0, "Mbit/s of each rank's link, as in tritonrec lab; 0: no links.", 0, 100_000)
    seed: int = setting(0, "Of everything that is drawn.", 0, MOST_SEED)

    def __post_init__(self) -> None:
        if self.batch_size < self.world_size:
            raise ValueError(f"{self.world_size} ranks need as many samples, got {self.batch_size}")
        if not 0 <= self.delay <= 1:
            raise ValueError(f"delays must be between 0 and 1000 ms, got {self.delay * 1e3:g}")
        object.__setattr__(self, "bounds", tuple(sorted({0, *self.bounds})))


@dataclass
class Series:
    """One scenario, backend and bound, with a number for every round."""

    scenario: str
    backend: str
    bound: int
    latency: list[float] = field(default_factory=list)  # seconds a batch, mean over ranks
    throughput: list[float] = field(default_factory=list)  # batches a second, summed over ranks (section V-C)
    response: list[float] = field(default_factory=list)  # seconds from a batch's turn to its prediction
    by_delays: list[float] = field(default_factory=list)  # seconds a batch that the delays alone would take
    largest_lag: int = 0


@dataclass
class Result:
    """All that was measured.

    `collectives[size][backend]` has seconds by round, `repetitions[count][backend]` those of all calls.
    """

    plan: ServeConfig
    settings: list[Series]
    collectives: Cells
    repetitions: Cells = field(default_factory=dict)
    served: str = ""

    def of(self, scenario: str, backend: str, bound: int) -> Series:
        """One setting."""
        key = (scenario, backend, bound)
        return next(each for each in self.settings if (each.scenario, each.backend, each.bound) == key)


def draw_delays(plan: ServeConfig, scenario: str, turn: int) -> np.ndarray:
    """(W, steps) seconds that ranks sleep, emulated computation too; those of a round are the same for all
    settings.
    """
    shape = (plan.world_size, plan.steps)
    delays = np.full(shape, plan.compute / 1e3)
    if scenario == "delays":
        delays += np.random.default_rng([plan.seed, turn]).uniform(0, plan.delay, shape)
    if scenario == "straggler":
        delays[-1] += plan.delay / 2
    return delays


def delays_alone(delays: np.ndarray, bound: int) -> float:
    """Seconds a batch takes, mean over ranks, if nothing but (W, steps) `delays` took time.

    Rank p starts exchange j when it has slept, and goes on when all have started exchange j - bound; at the
    end it waits for all of them. With bound 0 this is the mean of the longest delay of each step, and with
    a bound that is large enough the longest of the ranks' mean delays: nobody pays for another's delay.
    """
    ranks, steps = delays.shape
    starts = np.zeros((steps, ranks))
    now = np.zeros(ranks)
    for step in range(steps):
        starts[step] = now + delays[:, step]
        now = starts[step]
        if step >= bound:
            now = np.maximum(now, starts[step - bound].max())
    return float(starts.max() / steps) if steps else 0.0


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Mean, and half the width of its confidence interval by Student's t."""
    count = len(values)
    if count < 2:
        return float(np.mean(values)), float("nan")
    spread, half = float(np.std(values, ddof=1)), t_quantile(confidence, count - 1)
    return float(np.mean(values)), half * spread / sqrt(count)


def run_bench(
    plan: ServeConfig,
    console: Console,
    trace: Path | None = None,
    mpi: bool = True,
    timeout: timedelta = TIMEOUT,
) -> Result:
    """Measure all of `plan`; with `trace`, keep traces of the first round's bls runs there.

    Raises RuntimeError when a setting's predictions differ from synchronous inference in any bit, and
    `LabError` where links cannot be made here.
    """
    if plan.rate:
        require_tools()
    settings = [
        Series(scenario, backend, bound)
        for scenario in plan.scenarios
        for bound in plan.bounds
        for backend in BACKENDS
    ]
    if trace:
        trace.mkdir(parents=True, exist_ok=True)
    mpi = mpi and available()
    with _progress(console) as progress, ExitStack() as stack:
        served = Served(plan.table_rows, plan.dim, plan.data)
        if plan.checkpoint is not None and plan.scenarios:
            served = export_checkpoint(plan.checkpoint, Path(stack.enter_context(ScratchFolder())))
            served = replace(served, data=plan.data or served.data)
        described = served.describe() if plan.scenarios else ""
        plain = bool(plan.sizes or plan.repetitions)
        network = None
        if plan.rate:
            network = stack.enter_context(built(Network(plan.world_size, plan.rate, os.getpid())))
        collectives, repetitions = _beside_mpi(plan, network, progress) if plain and mpi else ({}, {})
        if not plan.scenarios and (mpi or not plain):
            return Result(plan, settings, collectives, repetitions)
        pool = stack.enter_context(RankPool((plan.world_size,), timeout, Enter(network) if network else None))
        if plain and not mpi:
            collectives, repetitions = _collectives(plan, pool, progress)
        task = progress.add_task("warming up", total=plan.rounds * len(settings))
        for scenario in plan.scenarios:
            short = np.zeros((plan.world_size, WARM_UP))
            for backend in BACKENDS:
                pool.run(
                    serve,
                    plan.world_size,
                    ServeRun(scenario, backend, 0, served, short, plan.batch_size, plan.seed),
                )
        for turn in range(plan.rounds):
            digests: dict[str, list[str]] = {}
            for place in range(len(settings)):
                # Each round begins with another setting.
                setting = settings[(place + turn * len(settings) // plan.rounds) % len(settings)]
                progress.update(task, description=f"round {turn + 1}: {_label(setting)}")
                keep = trace if turn == 0 and setting.backend == "bls" else None
                _measure(plan, pool, setting, turn, digests, served, keep, timeout)
                progress.advance(task)
    return Result(plan, settings, collectives, repetitions, described)


def _measure(
    plan: ServeConfig,
    pool: RankPool,
    setting: Series,
    turn: int,
    digests: dict[str, list[str]],
    served: Served,
    trace: Path | None = None,
    timeout: timedelta = TIMEOUT,
) -> None:
    delays = draw_delays(plan, setting.scenario, turn)
    run = ServeRun(
        setting.scenario,
        setting.backend,
        setting.bound,
        served,
        delays,
        plan.batch_size,
        plan.seed,
        trace,
        timeout,
    )
    ranks: list[dict[str, Any]] = pool.run(serve, plan.world_size, run)
    found = [each["digest"] for each in ranks]
    if digests.setdefault(setting.scenario, found) != found:
        raise RuntimeError(f"{_label(setting)}: predictions are not those of the other settings, bit for bit")
    setting.latency.append(float(np.mean([each["seconds"] for each in ranks])))
    setting.throughput.append(sum(1 / each["seconds"] for each in ranks))
    setting.response.append(float(np.mean([each["response"] for each in ranks])))
    setting.by_delays.append(delays_alone(delays, setting.bound))
    setting.largest_lag = max(setting.largest_lag, *(each["largest_lag"] or 0 for each in ranks))


def _collectives(plan: ServeConfig, pool: RankPool, progress: CommandProgress) -> tuple[Cells, Cells]:
    """Seconds by size, or number of repetitions, backend and round."""
    task = progress.add_task("all-to-alls", total=plan.rounds * len(plan.sizes))
    rounds, repeated = [], []
    for turn in range(plan.rounds):
        cells = {}
        for size in plan.sizes:
            cells[size] = of_ranks(pool.run(time_size, plan.world_size, size, plan.seed + turn))
            progress.advance(task)
        rounds.append(cells)
        ranks = pool.run(time_counts, plan.world_size, plan.repetitions, plan.seed + turn)
        repeated.append(counts_of_ranks(ranks))
    return _slowest(rounds), _slowest(repeated)


def _beside_mpi(plan: ServeConfig, network: Network | None, progress: CommandProgress) -> tuple[Cells, Cells]:
    """The same, in ranks started by mpiexec."""
    task = progress.add_task("all-to-alls beside MPI", total=plan.rounds * len(plan.sizes))
    sizes = list(plan.sizes)
    by_size, by_count = run_with_mpi(
        plan.world_size,
        plan.rounds,
        plan.seed,
        sizes,
        plan.repetitions,
        lambda: progress.advance(task),
        network,
    )
    return _slowest(by_size), _slowest(by_count)


def _slowest(rounds: list[Cells]) -> Cells:
    """By size, backend and round; a collective takes as long as its slowest rank.

    Only what all rounds have: a backend that was too slow for a number of repetitions is left out of it.
    """
    return {
        size: {
            name: [max(cells[size][name]) for cells in rounds]
            for name in by_name
            if all(name in cells.get(size, {}) for cells in rounds)
        }
        for size, by_name in rounds[0].items()
    }


def _label(setting: Series) -> str:
    return f"{setting.scenario}, {setting.backend}, k = {setting.bound}"


def _progress(console: Console) -> CommandProgress:
    return CommandProgress(console, TimeElapsedColumn())
