"""The command `profile`."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .options import (
    MOST,
    ConsistencyName,
    DataOption,
    ModelChoice,
    ModeName,
    TimeoutOption,
    checked,
    demand_writable,
    head_width,
    load_job,
)

FLAME = "Flame graph"


def profile(
    mode: Annotated[ModeName, typer.Option(help="How the steps are scheduled.")] = ModeName.nestpipe,
    data: DataOption = "ml-100k",
    model: Annotated[ModelChoice, typer.Option(help="As of train.")] = ModelChoice.hstu,
    world_size: Annotated[int, typer.Option(min=1, max=1024, help="Ranks to start here.")] = 1,
    micro_batches: Annotated[int, typer.Option(min=1, max=65_536, help="N, micro-batches per window.")] = 4,
    consistency: Annotated[
        ConsistencyName, typer.Option(help="batch: the bits of synchronous training.")
    ] = ConsistencyName.batch,
    steps: Annotated[
        int,
        typer.Option(
            min=3, max=MOST, help="Steps to profile, after a few to warm up; the first fills the pipeline."
        ),
    ] = 12,
    batch_size: Annotated[int, typer.Option(min=1, max=2**24, help="Samples of the global batch.")] = 128,
    dim: Annotated[int, typer.Option(min=1, max=65_536, help="Embedding and model dimension.")] = 64,
    layers: Annotated[int, typer.Option(min=1, max=1024, help="HSTU layers.")] = 2,
    out: Annotated[Path, typer.Option(help="Directory for trace.pftrace and flame.svg.")] = Path(
        "out/profile"
    ),
    flame: Annotated[
        bool,
        typer.Option(help="Run it once more under py-spy, and draw its samples.", rich_help_panel=FLAME),
    ] = True,
    rate: Annotated[
        int, typer.Option(min=1, max=1000, help="Samples per second.", rich_help_panel=FLAME)
    ] = 100,
    native: Annotated[
        bool, typer.Option("--native", help="Show C and C++ frames too.", rich_help_panel=FLAME)
    ] = False,
    flame_seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="Sample for so long at least.", rich_help_panel=FLAME)
    ] = 5.0,
    timeout: TimeoutOption = 60,
) -> None:
    """Show where a training step goes: a trace with lanes and operators, and a flame graph.

    The steps run under the recorder and torch.profiler, then again under py-spy, which would disturb the
    trace. Prints what takes most of each lane, and the Python functions that run most.
    """
    from ...nn import HSTUConfig
    from ...pipeline import WindowConfig
    from ..job import Job
    from ..profile.run import Profile
    from ..profile.run import profile as run_profile

    demand_writable(folders={"--out": out})

    def run() -> None:
        heads = 2
        width = head_width(dim, heads)
        sizes = HSTUConfig(dim=dim, layers=layers, heads=heads, qk_dim=width, v_dim=width)
        job = Job(data, model.value, batch_size, num_negatives=32, sizes=sizes, lr=3e-3)
        window = WindowConfig(1 if mode is ModeName.reference else micro_batches, consistency.value)
        plan = Profile(
            load_job(job), mode.value, window, steps=steps, flame=flame, rate=rate, native=native,
            flame_seconds=flame_seconds,
        )  # fmt: skip
        run_profile(plan, str(out), world_size, Console(), timedelta(seconds=timeout))

    checked(run)
