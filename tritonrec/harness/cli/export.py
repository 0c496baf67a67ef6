"""The command `export`."""

from __future__ import annotations

import logging
import tempfile
import tomllib
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ...checkpoint import CheckpointStream
from ...files.places import Place, place_of
from ...serving import Predictor
from ...serving import export as export_to
from ...serving.onnx import to_onnx
from ...serving.shards import Weights
from ...settings import MOST
from ..job import Job
from ..shown import say
from ..train.config import CONFIG, from_tables
from ..train.evaluate import evaluate_export
from ..train.run import Run
from .job import with_head_width
from .outputs import checked, require_writable


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
    weights: Annotated[
        Weights, typer.Option(help="Of tables; int8 rounds them, and prints what that costs in quality.")
    ] = "float32",
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also compile the dense model by AOTInductor; takes a minute.")
    ] = False,
    onnx: Annotated[
        Path | None, typer.Option(help="Also write the dense model of a dlrm to this file of ONNX.")
    ] = None,
) -> None:
    """Write a checkpoint's tables and dense model for serving and other tools.

    Tables become Parquet or safetensors in shards, never whole in memory; the dense model a program of
    torch.export, which is compared with the model in every bit. Python: tritonrec.serving.export.
    """

    require_writable({"--onnx": onnx})
    if onnx is not None and tables_only:
        raise typer.BadParameter("--onnx does not go with --tables-only")

    def run() -> dict[str, Any]:
        hint = "give --tables-only, or call tritonrec.serving.export with the model"
        model = None if tables_only else trained_model(checkpoint, step, hint)
        return export_to(
            checkpoint, out, model, step=step, format=format.value, metadata=metadata, shard_rows=shard_rows,
            compiled=compiled, weights=weights,
        )  # fmt: skip

    manifest = checked(run)
    tables = manifest["tables"].values()
    rows = sum(table["rows"] for table in tables)
    files = sum(len(table["files"]) for table in tables)
    parts = "" if manifest["dense"] is None else f"; dense model: {manifest['dense']['kind']}"
    console = Console()
    place = place_of(out)
    say(
        console,
        f"exported step {manifest['step']} to {place}: {len(tables)} table{'s'[: len(tables) > 1]} with "
        f"{rows:,} rows in {files} file{'s'[: files > 1]}{parts}",
    )
    if onnx is not None:
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses packages that no DLRM needs
        error = checked(lambda: to_onnx(place, onnx))
        say(console, f"written {onnx}: logits of onnxruntime are at most {error:.1e} of the largest off")
    if weights == "int8" and not tables_only:
        say(console, checked(lambda: _quality(checkpoint, step, place)))


def _quality(checkpoint: Path, step: int | None, out: Place) -> str:
    """Metrics of the test part with the rows of an export, beside those with rows in float32."""
    job, rounded = trained_run(checkpoint, step, "").job, Predictor.load(out)
    if rounded.vocabularies:
        job = replace(job, words=str(checkpoint))  # ids are those of the training
    try:
        loader = job.epochs()
    except (ValueError, OSError) as error:
        return f"what int8 costs was not measured: {error}"
    with tempfile.TemporaryDirectory(prefix="tritonrec-") as folder:
        export_to(checkpoint, exact := Path(folder, "tables"), step=step)
        tables = Predictor.load(exact).tables
    exactly = Predictor(rounded.manifest, tables, rounded.program, rounded.vocabularies)
    before, after = (evaluate_export(each, loader) for each in (exactly, rounded))
    found = (f"{name} {after[name]:.4f} ({after[name] - value:+.4f})" for name, value in before.items())
    return f"with int8 rows, and minus float32: {', '.join(found)}"


def trained_model(checkpoint: Path, step: int | None, hint: str) -> torch.nn.Module:
    """The model of `tritonrec train` that saved a checkpoint; `hint` says what to do where there is none."""
    run = trained_run(checkpoint, step, hint)
    return run.job.build(run.optimizer)[0]


def trained_run(checkpoint: Path, step: int | None, hint: str) -> Run:
    """The run of `tritonrec train` that saved a checkpoint; `hint` says what to do where there is none."""
    text = CheckpointStream(checkpoint, step).meta.get(CONFIG)
    if text is None:
        raise ValueError(f"{checkpoint} was not saved by this version of tritonrec train: {hint}")
    run = from_tables(Run(Job()), tomllib.loads(text), checkpoint)
    job = run.job
    if job.model != "dlrm":
        job = replace(job, sizes=with_head_width(job.sizes))
    return replace(run, job=job)
