"""`tritonrec profile`: one mode under the recorder and torch.profiler, then once more under py-spy."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from ...distributed import Communicators, RankPool
from ...distributed.environment import rank_here
from ...embedding import OptimizerName
from ...files.places import local_path
from ...optional import require
from ...pipeline import Mode, Trainer, WindowConfig
from ...settings import MOST, setting
from ...trace import NullRecorder, Recorder, SupportsRecording
from ..job import Job
from ..shown import say
from ..trace_report import trace_report
from ..train.gather import save_trace
from ..train.reports import progress_bar
from .flame import FlameError, PySpy
from .operators import name_threads, operators

TRACE, FLAME = "trace.pftrace", "flame.svg"


@dataclass(frozen=True)
class Profile:
    """The run to profile, and how.

    Args:
        job, mode, window, optimizer: see `Run`.
        steps: steps under the recorder and torch.profiler; the first only fills the pipeline.
        warm_up: steps before them, in which kernels are compiled and tables grow.
        flame: run it again under py-spy. rate: its samples per second. native: with C and C++ frames.
        flame_seconds: how long at least it samples, in whole steps.
    """

    job: Job
    mode: Mode = setting("nestpipe", "How the steps are scheduled.")
    window: WindowConfig = field(default_factory=WindowConfig)
    optimizer: OptimizerName = "adam"
    steps: int = setting(
        12, "Steps to profile, after a few to warm up; the first fills the pipeline.", 3, MOST
    )
    warm_up: int = 4
    flame: bool = setting(True, "Run it once more under py-spy, and draw its samples.", panel="Flame graph")
    rate: int = setting(100, "Samples per second.", 1, 1000, panel="Flame graph")
    native: bool = setting(False, "Show C and C++ frames too.", panel="Flame graph")
    flame_seconds: float = setting(5.0, "Sample for so long at least.", 0, 3600, panel="Flame graph")


def profile(plan: Profile, out: str, world_size: int, console: Console, timeout: timedelta) -> None:
    """Write OUT/trace.pftrace and OUT/flame.svg, and print where a step's time goes.

    Raises ValueError for what cannot be profiled, and OSError where OUT cannot be written. What keeps py-spy
    from sampling is printed, and the rest is done without it.
    """
    here = rank_here()
    if here.world_size > 1:
        raise ValueError(
            f"profile starts its ranks itself: run it without {here.launcher}, with --world-size"
        )
    if plan.steps < 3:
        raise ValueError(
            f"a profile needs 3 steps at least, two to measure and one to fill, got {plan.steps}"
        )
    require("perfetto", "tritonrec profile")
    folder = local_path(out, "the folder of a profile")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file: give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name in (TRACE, FLAME):  # those of an earlier run would not belong together with what comes now
        (folder / name).unlink(missing_ok=True)
    if world_size == 1:
        table, cost, problem = profile_rank(Communicators.local(), plan, out, console)
    else:
        with RankPool([world_size], timeout) as pool:
            table, cost, problem = pool.run(profile_rank, world_size, plan, out)[0]
    trace_report(folder / TRACE, console=console)
    say(console, table)
    say(
        console,
        f"operators of rank 0 in {plan.steps} steps; CPU time {cost:.2f} times that without torch.profiler\n"
        f"trace with all operators: {folder / TRACE}, for https://ui.perfetto.dev",
    )
    if plan.flame and not problem:
        say(console, f"flame graph: {folder / FLAME}, for a browser")
    if problem:
        console.print("[yellow]no flame graph:[/] ", end="")
        say(console, problem)


def profile_rank(
    communicators: Communicators, plan: Profile, out: str, console: Console | None = None
) -> tuple[str, float, str]:
    """Profile this rank; rank 0 writes the files.

    Four stretches of steps, each of which fills the pipeline and drains it: to warm up, without any profiler,
    under the recorder and torch.profiler, and under py-spy, which would be seen in the trace.

    Returns:
        torch's table of this rank's operators, the CPU time under torch.profiler over that without, and on
        rank 0 why there is no flame graph, empty where there is one or none was requested.
    """
    world_size = communicators.world_size
    model, tables, optimizer = plan.job.build(plan.optimizer)
    loader = plan.job.loader(communicators.rank, world_size)
    console = console or Console(quiet=communicators.rank != 0)
    done = 0

    def stretch(name: str, steps: int, recorder: SupportsRecording, threads: dict[int, str]) -> list[float]:
        """Train for `steps` and name the threads; returns seconds and CPU seconds, the ranks' means."""
        nonlocal done
        first, done = done, done + steps
        bar = progress.add_task(name, total=steps, loss="")
        start = torch.tensor([time.perf_counter_ns(), time.process_time_ns()], dtype=torch.int64)
        recipe = plan.job.recipe(model, optimizer)
        with Trainer(
            model, tables, optimizer, communicators, plan.mode, plan.window, recorder, **recipe
        ) as trainer:
            for _ in trainer.run(loader.batch(step) for step in range(first, first + steps)):
                progress.advance(bar)
            name_threads(threads)
        taken = torch.tensor([time.perf_counter_ns(), time.process_time_ns()], dtype=torch.int64) - start
        return (communicators.control.all_reduce(taken, "nanoseconds") / 1e9 / world_size).tolist()

    with progress_bar(console) as progress:
        stretch("warming up", plan.warm_up, NullRecorder(), {})
        seconds, bare = stretch("without a profiler", plan.steps, NullRecorder(), {})
        recorder = Recorder(communicators.rank, world_size)
        with operators(recorder) as found:
            _, watched = stretch("under torch.profiler", plan.steps, recorder, found.names)
        save_trace(communicators, recorder, str(Path(out) / TRACE))
        problem = ""
        if plan.flame:
            steps = max(plan.steps, math.ceil(plan.flame_seconds * plan.steps / seconds))
            run = partial(stretch, "under py-spy", steps, NullRecorder(), {})
            problem = _sample(communicators, plan, out, run)
    return found.table, watched / bare, problem


def _sample(communicators: Communicators, plan: Profile, out: str, run: Callable[[], object]) -> str:
    """Let rank 0's py-spy watch all ranks while they `run`; returns why that failed, on rank 0."""
    alone = communicators.world_size == 1
    problem, spy = "", None
    with ExitStack() as stack:
        if communicators.rank == 0:
            try:
                parent = os.getpid() if alone else os.getppid()
                spy = stack.enter_context(PySpy(parent, plan.rate, plan.native, subprocesses=not alone))
            except FlameError as error:
                problem = str(error)
        if any(communicators.control.all_gather_texts(problem)):
            return problem
        run()
        if spy is not None:
            try:
                spy.finish(Path(out) / FLAME)
            except FlameError as error:
                problem = str(error)
    return problem
