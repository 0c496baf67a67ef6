"""Scores of a Parquet file of histories into another one, which goes on where a killed run has ended.

The rows of the file are cut into parts. Each is a file of a folder beside the output, renamed when it is
whole, and at the end they become the output, which is renamed too. A part depends on its rows and the
model alone, so a run that was killed and goes on leaves the bytes of one that was not.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..data.log_files import LogFiles, files_at
from ..data.values import is_list
from ..files import atomic_write, check_writable, save_json
from ..files.places import local_path, place_of, read_document
from ..settings import MOST, setting
from .histories import array_of
from .predictor import Predictor
from .retrieval import check_k

PLAN = "plan.json"


@dataclass(frozen=True)
class ScoreConfig:
    """Columns and sizes.

    Args:
        candidates: the column of items to score; without it the best `k` of all are found.
        exclude_history: leave a user's history out of the best.
    """

    history: str = setting("history", "Column of histories: lists of ids or words, oldest first.")
    timestamps: str = setting("", "Column of their timestamps, for a model with times.")
    candidates: str = setting("", "Column of lists to score; by default the best of all items are found.")
    k: int = setting(10, "Best items of each user.", 1, MOST)
    exclude_history: bool = setting(True, "Leave a user's history out of the best items.")
    batch: int = setting(256, "Users that are computed together.", 1, 2**20)
    part: int = setting(16_384, "Rows of a part, after which a killed run goes on.", 1, MOST)


def score_file(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    predictor: Predictor,
    config: ScoreConfig,
    progress: Callable[[int, int], object] = lambda done, rows: None,
) -> int:
    """Write `source` with columns ``items`` and ``scores``, or ``scores`` alone of candidates; returns rows.

    All other columns but the histories, their timestamps and the candidates are kept, rows in their order.
    ``scores`` are float32, ``items`` int64 or words, as the histories are. `source` may be at a URL, `out` is
    local: its parts are beside it.

    Raises ValueError for a missing column, a row that `Predictor.retrieve` refuses, which is named, for a
    source that changes meanwhile, and for parts of another run: of another file, model or configuration.
    """
    out = local_path(out, "a file of scores")
    check_writable(out)
    if not config.candidates:
        check_k(config.k, len(predictor.item_ids))
    place = files_at(str(place_of(source)), "Parquet file")
    if place.is_folder or len(place.files) > 1:
        raise ValueError(f"{source} has {len(place.files)} files: score one after another")
    if out.exists() and place.filesystem.type_name == "local" and out.samefile(place.files[0]):
        raise ValueError(f"the output would replace {source}, whose rows it has: name another file")
    file = _opened(place)
    names = file.schema_arrow.names
    wanted = [each for each in (config.history, config.timestamps, config.candidates) if each]
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(f"{source} has no column {missing[0]!r}, but {', '.join(names)}")
    if twice := next(
        (each for each in [*names, *wanted] if names.count(each) > 1 or wanted.count(each) > 1), ""
    ):
        raise ValueError(f"column {twice!r} is there or named twice: give each a name and a use of its own")
    for name in wanted:
        kind = file.schema_arrow.field(name).type
        if not is_list(kind):
            raise ValueError(f"column {name!r} of {source} has {kind}: give a list for each row")
    made = {"scores"} if config.candidates else {"items", "scores"}
    if clash := made & ({*names} - {*wanted}):
        raise ValueError(f"{source} has a column {min(clash)!r} already, which the output makes: rename it")
    parts, rows = out.with_name(f".{out.name}.parts"), file.metadata.num_rows
    plan: dict[str, Any] = {
        "model": predictor.manifest["manifest_sha256"], "settings": asdict(config), "source": _state(place),
    }  # fmt: skip
    _check_plan(parts, plan)
    files = []
    for number, table in enumerate(_cut(place, file, config.part)):
        files.append(path := parts / f"{number:08d}.parquet")
        first = number * config.part
        if not path.exists():
            scored = _scored(table, predictor, config, first)
            with atomic_write(path) as written:
                pq.write_table(scored, written)
        progress(min(first + config.part, rows), rows)
    if _state(place) != plan["source"]:
        raise ValueError(f"{source} has changed while it was scored: remove {parts}, and call it again")
    with atomic_write(out) as whole:
        _join(files, whole)
    shutil.rmtree(parts)
    return rows


def _opened(place: LogFiles) -> pq.ParquetFile:
    try:
        source = place.filesystem.open_input_file(place.files[0])
        return pq.ParquetFile(source, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{place.path} cannot be read as Parquet: {error}") from error


def _state(place: LogFiles) -> list[Any]:
    """What changes with the file."""
    [about] = place.filesystem.get_file_info(place.files)
    is_local = place.filesystem.type_name == "local"
    return [os.path.realpath(about.path) if is_local else place.path, about.size, about.mtime_ns]


def _check_plan(parts: Path, plan: dict[str, Any]) -> None:
    """Begin, or go on with parts of the same run."""
    if not (parts / PLAN).exists():
        parts.mkdir(parents=True, exist_ok=True)
        save_json(plan, parts / PLAN)
        return
    try:
        before = dict(json.loads(read_document(parts / PLAN, "plan")))
    except (ValueError, TypeError):  # cut short with the power, or another's
        before = {}
    if before != plan and not [*parts.glob("*.parquet")]:  # no part was whole
        save_json(plan, parts / PLAN)
    elif before != plan:
        changed = [name for name in plan if before.get(name) != plan[name]]
        raise ValueError(
            f"{parts} has parts of an unfinished run with another {', '.join(changed)}: "
            "remove it to begin anew"
        )


def _cut(place: LogFiles, file: pq.ParquetFile, rows: int) -> Iterator[pa.Table]:
    """Tables of so many rows, the last one of fewer; row groups may have any size."""
    kept: list[pa.Table] = []
    count = 0
    try:
        for batch in file.iter_batches(batch_size=min(rows, 65_536)):
            kept.append(pa.Table.from_batches([batch]))
            count += len(batch)
            while count >= rows:
                whole = pa.concat_tables(kept)
                yield whole.slice(0, rows)
                kept, count = [whole.slice(rows)], count - rows
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{place.path} cannot be read as Parquet: {error}") from error
    if count or not file.metadata.num_rows:  # of no rows there is one part, with its columns
        yield pa.concat_tables([*kept, file.schema_arrow.empty_table()])


def _scored(table: pa.Table, predictor: Predictor, config: ScoreConfig, first: int) -> pa.Table:
    items: list[Any] = []
    scores: list[Any] = []
    for at in range(0, len(table), config.batch):
        part = table.slice(at, config.batch)
        columns = {
            name: part[name].to_pylist() for name in part.column_names if name in vars(config).values()
        }
        try:
            found = _answers(columns, predictor, config)
        except ValueError:
            for row in range(len(part)):  # which one it is
                alone = {name: values[row : row + 1] for name, values in columns.items()}
                try:
                    _answers(alone, predictor, config)
                except ValueError as error:
                    raise ValueError(f"row {first + at + row}: {error}") from error
            raise
        items += found[0]
        scores += found[1]
    left = [name for name in (config.history, config.timestamps, config.candidates) if name]
    kept = table.drop_columns(left)
    if not config.candidates:
        words = any(items) and isinstance(items[0][0], str)
        kept = kept.append_column("items", pa.array(items, pa.list_(pa.string() if words else pa.int64())))
    return kept.append_column("scores", pa.array(scores, pa.list_(pa.float32())))


def _answers(columns: dict[str, list[Any]], predictor: Predictor, config: ScoreConfig) -> tuple[Any, Any]:
    histories = columns[config.history]
    if None in histories:
        raise ValueError(f"column {config.history!r} has no history here")
    times = None
    if config.timestamps:
        times = columns[config.timestamps]
        if [*map(len, histories)] != [len(each or ()) for each in times]:
            raise ValueError(
                f"columns {config.history!r} and {config.timestamps!r} have lists of other lengths"
            )
    given, stamps = predictor.read(histories, times)
    vectors = predictor.vectors(given.ids, given.offsets, stamps)
    if not config.candidates:
        exclude = "history" if config.exclude_history else None
        ids, found = predictor.best_of(vectors, config.k, exclude, given)
        return (ids if isinstance(ids, list) else ids.tolist()), found.tolist()
    if None in columns[config.candidates]:
        raise ValueError(f"column {config.candidates!r} has no list of candidates here")
    words = predictor.vocabularies.get("item")
    wanted = [array_of(each, "list of candidates", words)[0] for each in columns[config.candidates]]
    rows = zip(vectors.split(1), wanted, strict=True)
    return [], [predictor.scores_of(vector, ids)[0].tolist() for vector, ids in rows]


def _join(files: list[Path], out: Path) -> None:
    """The parts, one row group each."""
    with pq.ParquetWriter(out, _read(files[0]).schema) as writer:
        for file in files:
            writer.write_table(_read(file))


def _read(part: Path) -> pa.Table:
    try:
        return pq.read_table(part, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{part} is damaged ({error}): remove it, and call it again") from error
