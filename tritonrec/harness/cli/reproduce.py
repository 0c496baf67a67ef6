"""The command `reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...optional import require
from .options import with_options
from .outputs import checked, require_writable


@with_options()
def reproduce(
    figures: Annotated[
        list[str],
        typer.Argument(help='A run, a text, words of a row such as "Fig. 9", or all; list shows them.'),
    ],
    folder: Annotated[
        Path, typer.Option(help="Figures as JSON, pictures, and the rows beside the texts go here.")
    ] = Path("reproduced"),
) -> None:
    """Make figures of the five papers again; print paper, record and this machine side by side.

    Runs that are scripts of the repository need a clone of it; what this machine cannot run is named.
    """
    from ..papers.reproduce import print_list, reproduce

    console = Console()
    if "list" in figures:
        print_list(console)
        return
    require_writable({}, {"--folder": folder})
    checked(lambda: require("matplotlib", "--folder"))
    raise typer.Exit(0 if checked(lambda: reproduce(figures, folder, console)) else 1)
