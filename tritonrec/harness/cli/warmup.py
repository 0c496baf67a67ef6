"""The command `warmup`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import warmup as warming
from ..devices import Target
from ..emulator.settings import Architecture
from ..job import Job
from ..train.config import read_config
from ..train.run import Run
from .options import with_options
from .outputs import checked
from .words import names

TARGET = Target()
ALL_MODELS, ALL_RULES = ", ".join(warming.MODELS), ", ".join(warming.OPTIMIZERS)


@with_options()
def warmup(
    target: Target = TARGET,
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = ALL_MODELS,
    optimizers: Annotated[str, typer.Option(help="Update rules, separated by commas.")] = ALL_RULES,
    gpu: Annotated[
        Architecture | None,
        typer.Option("--target", help="Compile Triton's kernels for this GPU, which need not be here."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="With --target: the run, as train --print-config prints it, or its checkpoints."),
    ] = None,
) -> None:
    """Compile the kernels of training and serving, so that the first run does not.

    For the build of an image: NUMBA_CACHE_DIR (and TRITON_CACHE_DIR for a GPU) say where compiled kernels are
    kept; without them they are beside the package, or in the home folder. A small run of each model compiles
    what a large one needs. Triton compiles for the sizes of a model too, so for a GPU give its config.
    """
    console = Console(highlight=False, soft_wrap=True)
    chosen = names(models, warming.MODELS, "--models")
    rules = names(optimizers, warming.OPTIMIZERS, "--optimizers")
    named = (models, optimizers) != (ALL_MODELS, ALL_RULES)
    for wrong, option, reason in (
        (gpu and target != TARGET, "--target", "emulates its kernels: leave --impl and --device out"),
        (config and named, "--config", "has model and rule: leave --models and --optimizers out"),
        (config and not gpu, "--config", "is a GPU's run: give --target too"),
    ):
        if wrong:
            raise typer.BadParameter(f"{option} {reason}", param_hint=option)

    def warm(report: Callable[[str], None]) -> warming.Warmed:
        if gpu is None:
            return warming.warm_up(chosen, rules, target, report)  # type: ignore[arg-type]
        if config is not None:
            return warming.warm_up_gpu(gpu, [read_config(config, Run(Job()))], report)
        runs = [replace(Run(Job(model=each)), optimizer=rule) for each, rule in warming.pairs(chosen, rules)]  # type: ignore
        return warming.warm_up_gpu(gpu, runs, report)

    with console.status("") as status:
        found = checked(lambda: warm(status.update))
    what = "functions" if gpu is None else f"programs for {gpu}"
    console.print(f"compiled {found.compiled} {what} in {found.seconds:.0f} s")
