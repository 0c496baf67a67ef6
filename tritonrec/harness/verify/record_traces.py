"""Traces of every mode: recorded, checked, drawn, and described."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from ...distributed import TIMEOUT, Communicators
from ...files import ScratchFolder
from ...files.places import local_path
from ...pipeline import STAGED
from ...trace import Recorder, save_joined
from ...trace.analysis import check_trace, summarise
from ...trace.reader import read
from ...trace.timeline import draw
from ..devices import kernels_of, rank_pool
from ..job import Job
from .cases import Case
from .run_case import prepared
from .variants import EACH

WORLD_SIZE, MICRO_BATCHES, STEPS = 2, 4, 8
MODES = STAGED


def trace_rank(communicators: Communicators, job: Job, case: Case, path: str) -> None:
    """Run `case` on this rank with a recorder and without comparisons; write the rank's trace."""
    recorder = Recorder(communicators.rank, communicators.world_size)
    with kernels_of(job.target), prepared(communicators, job, case, recorder) as (trainer, loader):
        for _ in trainer.run(loader.batch(step) for step in range(case.steps)):
            pass
    recorder.save(f"{path}.{communicators.rank}")


def record_traces(job: Job, directory: str, console: Console | None = None) -> bool:
    """Write MODE.pftrace and MODE.png for each mode into `directory`; False if a dependency was violated."""
    console = console or Console()
    job = replace(job, batch_size=128, num_negatives=32)
    target = local_path(directory, "a folder of traces")
    target.mkdir(parents=True, exist_ok=True)
    table = Table(
        title=f"Traces in {directory}: {WORLD_SIZE} ranks, {MICRO_BATCHES} micro-batches",
        caption="exposed: share of the communication during which a rank does not compute. hidden: share of "
        "the lookup that runs beside other work. edges: every dependency of the schedule seen honoured.",
    )
    exchanges: dict[str, str] = {}
    for name in ("mode", "step ms", "exposed", "hidden", "edges"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    sound = True
    with rank_pool(job.target.device, [(WORLD_SIZE, 1, 1)], TIMEOUT) as pool, ScratchFolder() as scratch:
        for mode in MODES:
            case = Case(mode, "batch", WORLD_SIZE, MICRO_BATCHES, False, "adam", STEPS, variant=EACH)
            part = f"{scratch}/{mode}"
            pool.run(trace_rank, WORLD_SIZE, job, case, part)
            path = save_joined([f"{part}.{rank}" for rank in range(WORLD_SIZE)], target / f"{mode}.pftrace")
            trace = read(path)
            draw(trace, target / f"{mode}.png")
            report = check_trace(trace)
            sound &= report.honoured
            exchanges[mode] = trace.metadata["exchanges"]
            summary = summarise(trace.spans)[0]
            table.add_row(
                mode,
                f"{summary.step_ns / 1e6:.1f}",
                f"{summary.exposed_ratio or 0:.0%}",
                f"{summary.hidden_lookup_ratio or 0:.0%}",
                "honoured" if report.honoured else "[red]VIOLATED[/]",
            )
    console.print(table)
    for said in dict.fromkeys(exchanges.values()):
        modes = ", ".join(mode for mode in MODES if exchanges[mode] == said)
        console.print(f"exchanges of {modes}: {said}", soft_wrap=True, highlight=False)
    return sound
