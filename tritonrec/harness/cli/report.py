"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...files.places import local_path
from ..report.build import build
from .outputs import checked, require_writable

OUT = Path("out")


def report(
    folder: Annotated[
        Path, typer.Option(help="With verify.json, bench.json, lab.json, simulate.json and traces/.")
    ] = OUT,
    html: Annotated[Path | None, typer.Option(help="Write the page to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write its tables as Markdown.")] = None,
) -> None:
    """Recorded figures on one page: contract, faults, benchmarks over commits, kernels, traces.

    A file that FOLDER lacks is taken from ci/baselines of the checkout, or named as missing. Exit status 1
    where a case differs, a fault is not caught, a dependency is violated, or a benchmark has become slower.
    """
    require_writable({"--html": html, "--markdown": markdown})

    def run() -> int:
        place = local_path(folder, "the folder of --folder")
        if folder != OUT and not place.is_dir():  # the figures of the checkout would stand for those named
            raise ValueError(f"--folder: {place} is no folder")
        return build(place, html, markdown)

    raise typer.Exit(checked(run))
