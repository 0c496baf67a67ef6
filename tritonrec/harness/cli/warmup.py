"""The command `warmup`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from .. import warmup as warming
from ..devices import Target
from .options import with_options
from .outputs import checked
from .words import names

TARGET = Target()


@with_options()
def warmup(
    target: Target = TARGET,
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = ", ".join(warming.MODELS),
    optimizers: Annotated[str, typer.Option(help="Update rules, separated by commas.")] = ", ".join(
        warming.OPTIMIZERS
    ),
) -> None:
    """Compile the kernels of training and serving, so that the first run does not.

    For the build of an image: NUMBA_CACHE_DIR (and TRITON_CACHE_DIR for a GPU) say where compiled kernels are
    kept; without them they are beside the package, or in the home folder. A small run of each model compiles
    what a large one needs.
    """
    console = Console(highlight=False, soft_wrap=True)
    chosen = names(models, warming.MODELS, "--models")
    rules = names(optimizers, warming.OPTIMIZERS, "--optimizers")
    with console.status("") as status:
        found = checked(
            lambda: warming.warm_up(chosen, rules, target, status.update)  # type: ignore[arg-type]
        )
    console.print(f"compiled {found.compiled} functions in {found.seconds:.0f} s")
