"""The command `emulate`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..emulator.run import run
from ..emulator.settings import Emulation
from .options import with_options
from .outputs import checked

DEFAULT = Emulation()


@with_options()
def emulate(
    command: Annotated[
        list[str] | None, typer.Argument(help="`pytest ...` or `python script.py ...`, behind two dashes.")
    ] = None,
    settings: Emulation = DEFAULT,
) -> None:
    """Run tests or a script with Triton's kernels compiled for a GPU and executed on the CPU.

    Finds races, accesses outside of tensors, barriers that not all threads reach, and results that depend on
    the order of the warps; prints the instructions and the bytes of each kernel.
    """
    raise typer.Exit(checked(lambda: run(command or [], settings)))
