"""The command `fuzz`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...optional import require
from ...settings import MOST
from ..shown import written
from ..verify.tools import SELECTIONS
from .outputs import checked, require_writable

MOST_MINUTES = 100_000
MOST_SEED = 2**31 - 1


def fuzz(
    minutes: Annotated[int, typer.Option(min=1, max=MOST_MINUTES, help="Minutes to search.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Of the configurations.")] = 0,
    configurations: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Configurations to try at most; by default no limit.")
    ] = None,
    configuration: Annotated[
        str, typer.Option(help="Try this configuration alone, as a failure prints it: a JSON object.")
    ] = "",
    inject: Annotated[
        str, typer.Option(help="A fault of verify --inject-faults or --corpus, to be found in its mode.")
    ] = "",
    database: Annotated[Path, typer.Option(help="Folder of earlier failures, which are tried first.")] = Path(
        ".hypothesis/tritonrec"
    ),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the counts to this file.")] = None,
) -> None:
    """Try random configurations against synchronous training, and print the smallest that fails.

    Ranks are threads of a process. A configuration chooses mode, ranks, micro-batches, model, optimizer,
    policies, storage, precisions, data and more. Those that a check refuses are counted by its message. Exit
    status 0 only if all others are equal to their references in every bit.
    """
    require_writable({"--json": json_file}, {"--database": database})
    faults = {fault.name: fault for fault in SELECTIONS[True, True]}
    if inject and inject not in faults:
        raise typer.BadParameter(f"--inject takes the name of a fault, got {inject!r}")
    checked(lambda: require("hypothesis", "tritonrec fuzz"))
    from ..fuzz import run
    from ..fuzz.configuration import Configuration

    mode = faults[inject].case.mode if inject else None
    console = Console()
    if configuration:
        one = checked(lambda: _given(Configuration.from_json, configuration))
        report = checked(lambda: run.try_one(one, inject or None, console))
    else:
        report = checked(
            lambda: run.search(60 * minutes, seed, configurations, database, inject or None, mode, console)
        )
    checked(lambda: written(report.as_json(), json_file, console, "report"))
    raise typer.Exit(1 if report.failures else 0)


def _given(parse, text: str):
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"--configuration: {error}") from error
