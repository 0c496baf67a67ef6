"""A full snapshot in a sink: an export whose shards each rank writes beside the training."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checkpoint import slices
from ...checkpoint.rows import Rows, TensorRows, sort_by_part
from ...data.vocabulary import Vocabulary
from ..exporter import SHARD_BYTES, entry_of, export_vocabularies, labels_of, seal
from ..manifest import MANIFEST
from ..programs import Scorer, write_program
from ..shards import SUFFIXES, Format, write_shard
from .replica import in_place_of
from .sinks import Sink

Tables = Mapping[str, Mapping[str, Tensor] | Rows]
Files = dict[str, list[dict[str, Any]]]
_FORMAT: Format = "safetensors"


@dataclass(frozen=True)
class Dense:
    """What rank 0 adds to the tables: the traced program with its values, and the words by vocabulary."""

    scorer: Scorer
    program: torch.export.ExportedProgram
    values: Mapping[str, Tensor]
    words: Mapping[str, Mapping[str, Tensor]]


def write_tables(
    sink: Sink,
    sequence: int,
    part: int,
    tables: Tables,
    described: Mapping[str, Any],
    persist: Callable[..., Any],
) -> Files:
    """Write this rank's rows, and return the entries of the files by table."""
    files: Files = {}
    with tempfile.TemporaryDirectory(prefix="tritonrec-") as folder:
        for (name, told), label in zip(described.items(), labels_of(described), strict=True):
            files[name] = []
            for number, columns in enumerate(_shards(tables[name], told["dim"])):
                path = Path(folder, f"{label}.{part:05d}.{number:05d}{SUFFIXES[_FORMAT]}")
                write_shard(path, columns, _FORMAT)
                entry = {**entry_of(path), "rows": len(columns["ids"])}
                persist(sink.put_file, sequence, path.name, path)
                path.unlink()
                files[name].append(entry)
        path = Path(folder, name_of_part(part))
        path.write_text(json.dumps(files))
        if part:
            persist(sink.put_file, sequence, path.name, path)
    return files


def write_manifest(
    sink: Sink,
    sequence: int,
    step: int,
    files: list[Files],
    described: Mapping[str, Any],
    dense: Dense,
    persist: Callable[..., Any],
) -> str:
    """Write program, words and manifest of a snapshot whose tables are there; returns its checksum."""
    tables = {}
    for name, told in described["tables"].items():
        entries = [entry for part in files for entry in part[name]]
        rows = sum(entry["rows"] for entry in entries)
        tables[name] = {**told, "format": _FORMAT, "rows": rows, "files": entries}
    with tempfile.TemporaryDirectory(prefix="tritonrec-") as name:
        folder = Path(name)
        for each, value in dense.values.items():
            dense.program.state_dict[each] = in_place_of(dense.program.state_dict[each], value)
        write_program(dense.program, folder / "dense.pt2")
        program = {"torch": torch.__version__, "program": entry_of(folder / "dense.pt2")}
        words = {each: Vocabulary.from_state(state) for each, state in dense.words.items()}
        body = seal(
            folder, step, tables, described["features"], {**dense.scorer.described, **program},
            export_vocabularies(words, folder),
        )  # fmt: skip
        for path in sorted(folder.iterdir(), key=lambda each: (each.name == MANIFEST, each.name)):
            persist(sink.put_file, sequence, path.name, path)
    return body["manifest_sha256"]


def name_of_part(part: int) -> str:
    """The file in which a rank other than 0 tells rank 0 of its shards."""
    return f"part-{part:05d}.json"


def ascending(rows: Mapping[str, Tensor] | Rows) -> Mapping[str, Tensor]:
    """All columns of a table, by ascending keys."""
    rows = TensorRows(rows) if isinstance(rows, Mapping) else rows
    rows.arrange(sort_by_part([]))
    return rows.read(0, np.argsort(rows.keys(0).numpy()))


def _shards(rows: Mapping[str, Tensor] | Rows, dim: int) -> Any:
    """The ids and weights of a table, a shard of about `SHARD_BYTES` at a time; none for an empty one."""
    rows = TensorRows(rows) if isinstance(rows, Mapping) else rows
    shards = min(slices.SLICES, 1 + len(rows) * (8 + 4 * dim) // SHARD_BYTES)
    rows.arrange(sort_by_part([at * slices.SLICES // shards for at in range(1, shards)]))
    for number in range(shards):
        order: np.ndarray = slices.order_of(rows.keys(number))
        if len(order):
            columns = rows.read(number, order)
            yield {"ids": columns["keys"], "weights": columns["rows"][:, :dim]}
