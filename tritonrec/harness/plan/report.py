"""`tritonrec plan CONFIG`: the trial, and the forecast as a table."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from ... import distributed
from ...capacity import Room, Sizes, memory_left
from ...distributed.environment import rank_here
from ...files import save_json
from ...host_memory import keep_freed_memory
from ...settings import in_bytes
from ..shown import say, table
from ..train.launch import Launch
from ..train.run import Run
from .beside import settings_text
from .forecast import Forecast, count_rows, forecast
from .trial import Rank, trial, trials

KINDS = {
    "process": "libraries, log",
    "dense": "dense model and its optimizer states",
    "work": "windows in flight, activations",
    "rows": "rows",
    "states": "optimizer states of rows",
    "keys": "keys, scores, counts",
    "doubling": "key structure while it doubles, policies while they choose",
    "evaluation": "more in an evaluation",
    "saving": "more in a save",
    "peak": "at most at one time",
}
"""By field of `Need` what it is."""


def alone(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """``function(communicators, *args)`` of one rank in a process that begins anew, as a command does.

    A rank of a pool is forked from a server: pages of libraries, 150 MB, count for it once it touches them.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), keep_freed_memory) as process:
        return process.submit(_alone, function, args).result()


def _alone(function: Callable[..., dict[str, Any]], args: tuple[Any, ...]) -> dict[str, Any]:
    return function(distributed.Communicators.local(), *args)


def plan_run(
    run: Run,
    world_size: int,
    replicas: int = 1,
    nodes: int = 1,
    trial_steps: int | None = None,
    memory: int | None = None,
    timeout: timedelta = timedelta(seconds=60),
    json_file: Path | None = None,
    console: Console | None = None,
) -> Forecast | None:
    """Try some steps of a run on all of its ranks here, and print what the whole will need.

    Under a launcher its ranks are those of the trial; one of them prints, and the others return None.

    Args:
        trial_steps: to try; as many as 20 s hold by default, 12 to 100.
        memory: bytes of the machine for all ranks; those that are left here by default.
    """
    console = console or Console()
    room = None if memory is None else Room(memory, memory, "--memory")
    launched = rank_here().world_size > 1
    if launched:  # its ranks, which are there still, are those that need what is left now
        room = room or memory_left()
    for again in (False, True):
        if world_size == 1:
            found, first = [alone(trial, run, trial_steps)], True
        else:
            launch = Launch(world_size, replicas, timeout, nodes, run.job.target.device)
            each_rank, first, _ = launch.run(trials, run, trial_steps)
            found = each_rank["ranks"]
        if again or not any(each["compiled"] for each in found):
            break
        # The run itself will find its kernels compiled, and have no compiler's memory.
        if launched:
            console.print("kernels were compiled in the trial, which took memory and time: plan once more")
            break
        console.print("kernels were compiled in the trial: it is made once more without")
    if not first:
        return None
    ranks = [Rank(**{**each, "tables": [Sizes(**table) for table in each["tables"]]}) for each in found]
    result = forecast(run, ranks, count_rows(run), room, replicas)
    print_forecast(result, console)
    if json_file:
        more = {"lacking": result.lacking, "advice": result.advice(), "settings": settings_text(run)}
        save_json({**asdict(result), **more}, json_file)
    return result


def print_forecast(found: Forecast, console: Console) -> None:
    """Memory of the rank that needs most, time, bytes, and what would make it fit."""
    most = max(found.ranks, key=lambda rank: rank.peak)
    sizes = [(words, in_bytes(getattr(most, name))) for name, words in KINDS.items()]
    memory = table(f"Memory of a rank at the end of {found.steps:,} steps", ("", "size"), sizes)
    memory.rows[-2].end_section = True  # above the sum
    console.print(memory)
    counted = f", going by the batches of {found.steps_counted:,} steps" * (found.steps_counted < found.steps)
    hours, minutes = divmod(found.seconds / 60, 60)
    lines = [
        f"rows: {found.rows:,} at the end{counted}; a checkpoint has {in_bytes(found.checkpoint)}",
        f"time: {found.step_seconds * 1e3:.1f} ms a step, {hours:.0f} h {minutes:.1f} min without the start",
        f"links: {found.link_bytes / 1e6:.2f} MB a step and rank",
    ]
    if found.disk_read or found.disk_written:
        read, written = found.disk_read / 1e6, found.disk_written / 1e6
        rate = (read + written) / max(found.step_seconds, 1e-9)
        lines.append(
            f"disk: {read:.2f} MB of rows read and {written:.2f} MB written a step and rank, {rate:.1f} MB/s"
        )
    needed = sum(rank.peak for rank in found.ranks)
    of = f"{in_bytes(found.room.left)} are left of {in_bytes(found.room.limit)} of {found.room.of}"
    if found.lacking > 0:
        lines.append(f"DOES NOT FIT: all ranks need {in_bytes(needed)}, {of}: {in_bytes(found.lacking)} lack")
    else:
        lines.append(f"fits: all ranks need {in_bytes(needed)}, {of}")
    say(console, "\n".join([*lines, *(f"  - {each}" for each in found.advice())]))
