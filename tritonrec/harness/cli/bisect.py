"""The command `bisect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...files import save_json
from .. import bisect as bisection
from .outputs import checked, require_writable

MOST_PARTS = 4
"""Of a group, printed; `--json` has all."""
GROUPS = ("dense/model/", "dense/", "")
"""How the names of a group's parts begin: parameters, optimizer states and the like, tables and the rest."""


def bisect(
    a: Annotated[Path, typer.Argument(help="A run: its checkpoints, or its log of --json-lines.")],
    b: Annotated[Path, typer.Argument(help="Another run, of any world size.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what differs to this file.")] = None,
) -> None:
    """Find the first difference of two runs: step, tensor or table, key, column, both values.

    Compared are the steps that both have, in every bit: dense parameters, optimizer states, rows and their
    metadata. Exit status 0 if all are equal, 1 if not.
    """
    require_writable({"--json": json_file}, inputs={"A": a, "B": b})
    found = checked(lambda: bisection.bisect(a, b))
    if json_file:
        checked(lambda: save_json(found.as_json(), json_file))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if found.equal:
        console.print(f"equal in every bit: {_steps(found.equal)}")
    for name, (left, right) in found.settings.items():
        console.print(f"other setting: {name} is {left} and {right}")
    if found.step is None:
        raise typer.Exit(0)
    console.print(f"step {found.step} differs in {len(found.parts)} part{'s'[: len(found.parts) > 1]}:")
    left = found.parts
    for prefix in GROUPS:
        group = [part for part in left if part.name.startswith(prefix)]
        left = [part for part in left if not part.name.startswith(prefix)]
        for part in group[:MOST_PARTS]:
            console.print(f"  {part}")
        if len(group) > MOST_PARTS:
            console.print(f"  and {len(group) - MOST_PARTS} more of {prefix or 'the rest'}")
    raise typer.Exit(1)


def _steps(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
