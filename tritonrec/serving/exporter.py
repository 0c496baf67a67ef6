"""A trained model for serving: its tables in shards, its dense part as a program, and a manifest.

::

    OUT/
      manifest.json                 step, tables, features, dense part, and the checksum of every file
      item.00000.parquet            ids (n,) int64 and weights (n, dim) float32 of table "item"
      item.00001.parquet
      dense.pt2                     `torch.export`
      dense.compiled.pt2            AOTInductor, where it was wanted
      words-item.parquet            where the log had words: row i is the word of item i

The folder is written under another name and renamed at its end, so that it is complete or absent; at a URL
the manifest is written last. Rows are
ordered by hash slice and id, whatever saved the checkpoint: equal states give equal tables, byte for byte.
"""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import CheckpointStream, unflatten
from ..checkpoint.files import flush, sha256_of
from ..checkpoint.manifest import add_checksum
from ..data.vocabulary import Vocabulary, vocabularies_of
from ..embedding.state_check import check_description
from ..files.places import Place, RemotePath, become, place_of
from ..kernels.autocast import DTYPES, Precision
from ..settings import typed
from ..version import __version__
from .exported_table import encoded
from .manifest import FORMAT, MANIFEST, VERSION
from .programs import SCORER, Arguments, Scorer, check_compiler, compile_program, save_program, scorer_of
from .shards import SUFFIXES, WEIGHTS, Format, Weights, write_shard

SHARD_BYTES = 64 << 20
"""Of a shard whose rows nobody has counted."""


@typed
def export(
    checkpoint: Place | str,
    out: Place | str,
    model: torch.nn.Module | None = None,
    *,
    scorer: torch.nn.Module | None = None,
    examples: Sequence[Arguments] = (),
    step: int | None = None,
    format: Format = "parquet",
    metadata: bool = False,
    shard_rows: int | None = None,
    compiled: bool = False,
    precision: Precision | None = None,
    weights: Weights = "float32",
) -> dict[str, Any]:
    """Export a checkpoint of a `Trainer` for `Predictor.load` and other tools; returns the manifest.

    A part of a table is in memory at a time: a slice of the checkpoint and a shard. No trainer of this
    process may be in a step while a model is traced: torch marks the whole process as tracing.

    Args:
        checkpoint: its directory. step: of the checkpoint there, the newest by default.
        out: a folder that does not exist.
        model: of the checkpoint; its values do not matter, a copy gets those of the checkpoint, of the
            average where there is one. None: the tables alone.
        scorer: a module of tensors that holds `model`, for a model that is not ours. examples: arguments of
            two calls or more; sizes that differ between them are dynamic, and all are compared.
        metadata: also the optimizer state of each row (``state``) and its policies' numbers.
        shard_rows: rows of a file; those of about 64 MiB by default.
        compiled: also compile the dense part by AOTInductor.
        precision: of the dense part's arithmetic; by default that of the training, whose evaluation has the
            same bits then. A checkpoint of an earlier version does not tell it: ``"float32"``.
        weights: of tables: ``"int8"`` rounds each to one of 256 between the least and the most of its row. A
            quarter of the memory, and not the bits of the training.

    Raises:
        ValueError: `out` exists, an argument is out of range, the checkpoint was not saved by a `Trainer` of
            this version, its model is another one, or the dense part cannot be traced or differs in a bit.
        TypeError: a model that is not ours, without a scorer.
        CheckpointError: as `checkpoint.load`.
    """
    out = place_of(out)
    if isinstance(out, RemotePath):
        out.require_writable()
    if (out / MANIFEST).is_file() if isinstance(out, RemotePath) else os.path.lexists(out):
        raise ValueError(f"{out} exists: export to a new folder")
    if format not in SUFFIXES:
        raise ValueError(f"format must be {' or '.join(SUFFIXES)}, got {format!r}")
    if shard_rows is not None and shard_rows < 1:
        raise ValueError(f"shard_rows must be at least 1, got {shard_rows}")
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be {' or '.join(WEIGHTS)}, got {weights!r}")
    if precision is not None and precision not in DTYPES:
        raise ValueError(f"precision must be {', '.join(DTYPES)}, got {precision!r}")
    of_dense = {
        "compiled": compiled, "scorer": scorer is not None, "examples": examples, "precision": precision
    }  # fmt: skip
    if model is None and (given := [name for name, each in of_dense.items() if each]):
        raise ValueError(f"{given[0]} goes with a model")
    if compiled:
        check_compiler()
    stream = CheckpointStream(checkpoint, step)
    described = stream.meta.get("embedding")
    if described is None:
        raise ValueError(
            f"{checkpoint} does not say which columns of its tables are weights: it was not saved by a "
            "Trainer of this version"
        )
    check_description(described, stream.columns)
    dense = None
    if model is not None:
        dense = _scorer(stream, model, scorer, examples, described)
        trained = stream.meta.get("dense_precision", "float32")
        if trained not in DTYPES:
            raise ValueError(f"{checkpoint} was trained in the precision {str(trained)[:40]!r}")
        dense = replace(dense, precision=precision or trained)
    with published(out) as partial:
        tables = {
            name: {
                **table,
                **_export_table(stream, partial, name, label, table, format, metadata, shard_rows, weights),
            }
            for (name, table), label in zip(
                described["tables"].items(), labels_of(described["tables"]), strict=True
            )
        }
        own = None if dense is None else _export_dense(dense, partial, compiled)
        words = export_vocabularies(vocabularies_of(stream.dense()), partial)
        body = seal(partial, stream.step, tables, described["features"], own, words)
    return body


@contextmanager
def published(out: Place) -> Iterator[Path]:
    """Yield a folder to write to, which is at `out` in the end: renamed, or uploaded, the manifest last."""
    if isinstance(out, RemotePath):
        with tempfile.TemporaryDirectory(prefix="tritonrec-") as name:
            yield Path(name)
            for file in sorted(os.listdir(name), key=lambda each: (each == MANIFEST, each)):
                (out / file).upload(Path(name, file))
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name[:50]}-{secrets.token_hex(8)}.part")
    partial.mkdir()
    try:
        yield partial
        flush(partial)
        become(partial, out)
        flush(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def seal(
    folder: Path,
    step: int,
    tables: Mapping[str, Any],
    features: Mapping[str, Any],
    dense: Mapping[str, Any] | None,
    vocabularies: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the manifest of an export whose other files are there, and return it."""
    words = {"vocabularies": vocabularies} if vocabularies else {}
    body = add_checksum(
        {
            "format": FORMAT, "version": VERSION, "tritonrec": __version__, "step": step, "tables": tables,
            "features": features, "dense": dense, **words,
        }
    )  # fmt: skip
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(body, indent=1) + "\n")
    flush(manifest)
    return body


def export_vocabularies(vocabularies: Mapping[str, Vocabulary], folder: Path) -> dict[str, Any]:
    """Write vocabularies; their entries of the manifest."""
    entries = {}
    for (name, vocabulary), label in zip(vocabularies.items(), labels_of(vocabularies), strict=True):
        path = folder / f"words-{label}.parquet"
        vocabulary.save(path)
        entries[name] = {**entry_of(path), "words": len(vocabulary)}
    return entries


def labels_of(names: Mapping[str, Any]) -> Iterator[str]:
    """For each table how its files begin: its name in safe characters, with a number where two share it."""
    seen: set[str] = set()
    for number, name in enumerate(names):
        label = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:40] or "table"
        label = f"{label}-{number}" if label in seen else label
        seen.add(label)
        yield label


def _export_table(
    stream: CheckpointStream,
    folder: Path,
    name: str,
    label: str,
    table: Mapping[str, Any],
    format: Format,
    metadata: bool,
    shard_rows: int | None,
    weights: Weights,
) -> dict[str, Any]:
    """Write a table's shards; ``format``, ``weights``, ``rows``, ``files`` of the manifest."""
    (width,) = stream.columns[name]["rows"][1]
    rows = shard_rows or max(1, SHARD_BYTES // (8 + 4 * (width if metadata else table["dim"])))
    files: list[dict[str, Any]] = []
    for columns in _shards(stream, name, table["dim"], metadata, rows):
        path = folder / f"{label}.{len(files):05d}{SUFFIXES[format]}"
        if weights == "int8":
            try:
                columns |= encoded(columns["weights"])
            except ValueError as error:
                raise ValueError(f"table {name}, file {len(files)}: {error}") from error
        write_shard(path, columns, format)
        files.append({**entry_of(path), "rows": len(columns["ids"])})
    described = {} if weights == "float32" else {"weights": weights}
    return {"format": format, **described, "rows": sum(each["rows"] for each in files), "files": files}


def _shards(
    stream: CheckpointStream, name: str, dim: int, metadata: bool, shard_rows: int
) -> Iterator[dict[str, Tensor]]:
    """The columns of a table, `shard_rows` rows at a time; one shard of none for an empty table."""
    waiting: dict[str, list[Tensor]] = {}
    count = written = 0
    for columns in stream.rows(name):
        columns = _columns(columns, dim, metadata)
        for column, values in columns.items():
            waiting.setdefault(column, []).append(values)
        count += len(columns["ids"])
        if count >= shard_rows:
            joined = {column: torch.cat(parts) for column, parts in waiting.items()}
            for start in range(0, count - shard_rows + 1, shard_rows):
                yield {column: values[start : start + shard_rows] for column, values in joined.items()}
                written += 1
            rest = count - count % shard_rows
            waiting = {column: [values[rest:].clone()] for column, values in joined.items()}
            count %= shard_rows
    if count or not written:
        yield {column: torch.cat(parts) for column, parts in waiting.items()}


def _columns(columns: dict[str, Tensor], dim: int, metadata: bool) -> dict[str, Tensor]:
    """Those of an export from those of a checkpoint."""
    ids, rows = columns.pop("keys"), columns.pop("rows")
    found = {"ids": ids, "weights": rows[:, :dim]}
    if metadata:
        found |= {"state": rows[:, dim:]} if rows.shape[1] > dim else {}
        found |= columns
    return found


def load_weights(stream: CheckpointStream, model: torch.nn.Module) -> None:
    """Give `model` the values of a checkpoint: those of the average, where the training kept one.

    Raises ValueError for another model, or a checkpoint that no `Trainer` saved.
    """
    plain = stream.meta.get("dense")
    if plain is None:
        raise ValueError(f"the checkpoint of step {stream.step} has no dense model of a Trainer")
    state = unflatten(plain, {f"dense/{name}": tensor for name, tensor in stream.dense().items()})
    prefix = "module."
    part = "average" if isinstance(state, dict) and "average" in state else "model"
    values = state.get(part) if isinstance(state, dict) else None
    if not isinstance(values, dict):
        raise ValueError(f"the checkpoint of step {stream.step} has no {part}, but {type(values).__name__}")
    if part == "average":
        values = {
            name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)
        }
    own = model.state_dict()
    missing = [name for name in own if name not in values]
    unexpected = [name for name in values if name not in own]
    different = [f"Missing key(s) {', '.join(missing)}"] if missing else []
    different += [f"Unexpected key(s) {', '.join(unexpected)}"] if unexpected else []
    different += [
        f"{name} is {_kind(values[name])} there, {_kind(own[name])} here"
        for name in own.keys() & values.keys()
        if _kind(values[name]) != _kind(own[name])
    ]
    if different:
        raise ValueError(
            f"the checkpoint's model is another one than {type(model).__name__}: {'; '.join(different)}"
        )
    model.load_state_dict(values)


def _kind(value: Any) -> str:
    """The shape of a tensor, in words."""
    return f"{tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _scorer(
    stream: CheckpointStream,
    model: torch.nn.Module,
    scorer: torch.nn.Module | None,
    examples: Sequence[Arguments],
    described: Mapping[str, Any],
) -> Scorer:
    """The scorer with the checkpoint's values, in evaluation mode."""
    model, made = copied_scorer(model, scorer, examples, described)
    load_weights(stream, model)
    return made


def copied_scorer(
    model: torch.nn.Module,
    scorer: torch.nn.Module | None,
    examples: Sequence[Arguments],
    described: Mapping[str, Any],
) -> tuple[torch.nn.Module, Scorer]:
    """A copy of `model`, and a scorer in evaluation mode that holds the copy."""
    if scorer is None and examples:
        raise ValueError("examples goes with a scorer: those of a model of ours are made here")
    if scorer is not None and not any(each is model for each in scorer.modules()):
        raise ValueError("scorer must hold model as a module, or be it: its values are loaded there")
    model, scorer = copy.deepcopy((model, scorer))
    if scorer is not None:
        return model, Scorer(SCORER, scorer.eval(), examples, {})
    tables, features = described["tables"], described["features"]
    dims = {tables[feature["table"]]["dim"] for feature in features.values()}
    model.eval()
    dim = tables[features["item"]["table"]]["dim"] if "item" in features else max(dims)
    return model, scorer_of(model, dim)


def _export_dense(scorer: Scorer, folder: Path, compiled: bool) -> dict[str, Any]:
    """Write the programs; the manifest's part of them."""
    path = folder / "dense.pt2"
    program = save_program(scorer, path)
    found = {**scorer.described, "torch": torch.__version__, "program": entry_of(path)}
    if compiled:
        path = folder / "dense.compiled.pt2"
        compile_program(scorer, program, path)
        found["compiled"] = entry_of(path)
    return found


def entry_of(path: Path) -> dict[str, Any]:
    """A file's entry of the manifest, flushed to the disk."""
    flush(path)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
