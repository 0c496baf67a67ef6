"""The command `trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import trace_report
from .outputs import checked, require_writable


def trace(
    file: Annotated[Path, typer.Argument(help="A trace written by verify, train or Recorder.save.")],
    png: Annotated[Path | None, typer.Option(help="Draw the timeline.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Time per lane, exposed communication, hidden lookup; check that every dependency was honoured."""
    require_writable({"--png": png, "--json": json_file}, inputs={"FILE": file})
    raise typer.Exit(checked(lambda: trace_report.trace_report(file, png=png, json_out=json_file)))
