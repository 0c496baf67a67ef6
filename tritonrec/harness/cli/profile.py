"""The command `profile`."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...pipeline import WindowConfig
from ..job import Job
from ..profile import run
from ..profile.run import Profile
from .job import ready
from .options import MOST_RANKS, TimeoutOption, with_options
from .outputs import checked, require_writable

PLAN = Profile(Job(batch_size=128, num_negatives=32, lr=3e-3), window=WindowConfig(4))
OFFERED = (
    "data", "model", "batch_size", "dim", "layers", "mode", "micro_batches", "consistency", "steps",
    "flame", "rate", "native", "flame_seconds",
)  # fmt: skip


@with_options(OFFERED)
def profile(
    plan: Profile = PLAN,
    world_size: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Ranks to start here.")] = 1,
    out: Annotated[Path, typer.Option(help="Directory for trace.pftrace and flame.svg.")] = Path(
        "out/profile"
    ),
    timeout: TimeoutOption = 60,
) -> None:
    """Show where a training step goes: a trace with lanes and operators, and a flame graph.

    The steps run under the recorder and torch.profiler, then again under py-spy, which would disturb the
    trace. Prints the times of lanes and the operators that take most.
    """
    require_writable(folders={"--out": out})
    checked(lambda: run.profile(ready(plan), str(out), world_size, Console(), timedelta(seconds=timeout)))
