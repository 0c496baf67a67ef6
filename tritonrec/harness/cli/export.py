"""The command `export`."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ...checkpoint import CheckpointStream
from ...files.places import place_of
from ...serving import export as export_to
from ...settings import MOST
from ..job import Job
from ..train.config import CONFIG, from_tables
from ..train.run import Run
from .job import with_head_width
from .outputs import checked


class Format(StrEnum):
    """Of a table's files."""

    PARQUET = "parquet"
    SAFETENSORS = "safetensors"


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of a checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    step: Annotated[
        int | None, typer.Option(min=0, max=MOST, help="Of the checkpoint; by default the newest.")
    ] = None,
    format: Annotated[Format, typer.Option(help="Of the tables' files.")] = Format.PARQUET,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Also optimizer states and the numbers of policies.")
    ] = False,
    shard_rows: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Rows of a file; by default those of 64 MiB.")
    ] = None,
    tables_only: Annotated[
        bool, typer.Option("--tables-only", help="Leave out the dense model; for models of your own.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also compile the dense model by AOTInductor; takes a minute.")
    ] = False,
) -> None:
    """Write a checkpoint's tables and dense model for serving and other tools.

    Tables become Parquet or safetensors in shards, never whole in memory; the dense model a program of
    torch.export, which is compared with the model in every bit. Python: tritonrec.serving.export.
    """

    def run() -> dict[str, Any]:
        hint = "give --tables-only, or call tritonrec.serving.export with the model"
        model = None if tables_only else trained_model(checkpoint, step, hint)
        return export_to(
            checkpoint, out, model, step=step, format=format.value, metadata=metadata, shard_rows=shard_rows,
            compiled=compiled,
        )  # fmt: skip

    manifest = checked(run)
    tables = manifest["tables"].values()
    rows = sum(table["rows"] for table in tables)
    files = sum(len(table["files"]) for table in tables)
    parts = "" if manifest["dense"] is None else f"; dense model: {manifest['dense']['kind']}"
    console = Console()
    place = place_of(out)
    console.print(
        f"exported step {manifest['step']} to {place}: {len(tables)} table{'s'[: len(tables) > 1]} with "
        f"{rows:,} rows in {files} file{'s'[: files > 1]}{parts}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def trained_model(checkpoint: Path, step: int | None, hint: str) -> torch.nn.Module:
    """The model of `tritonrec train` that saved a checkpoint; `hint` says what to do where there is none."""
    text = CheckpointStream(checkpoint, step).meta.get(CONFIG)
    if text is None:
        raise ValueError(f"{checkpoint} was not saved by this version of tritonrec train: {hint}")
    run = from_tables(Run(Job()), tomllib.loads(text), checkpoint)
    job = run.job if run.job.model == "dlrm" else replace(run.job, sizes=with_head_width(run.job.sizes))
    return job.build(run.optimizer)[0]
