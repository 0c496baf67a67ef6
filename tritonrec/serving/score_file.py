"""Scores of a Parquet file of samples into another one, which goes on where a killed run has ended.

The rows of the file are cut into parts. Each is a file of a folder beside the output, renamed when it is
whole, and at the end they become the output, which is renamed too. A part depends on its rows and the
model alone, so a run that was killed and goes on leaves the bytes of one that was not.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ..data.log_files import LogFiles, files_at
from ..data.values import is_list
from ..files import atomic_write, check_writable, save_json
from ..files.places import local_path, place_of, read_document
from ..settings import MOST, setting
from .histories import array_of
from .impressions import impressions_of
from .predictor import Predictor
from .programs import CLICK, IMPRESSION, NEXT_ITEM
from .retrieval import check_k

PLAN = "plan.json"


@dataclass(frozen=True)
class ScoreConfig:
    """Columns and sizes.

    Args:
        candidates: the column of items to score; without it the best `k` of all are found. A GRM needs it.
        dense: of a DLRM. exclude_history: leave a user's history out of the best.
    """

    history: str = setting("history", "Column of histories: lists, oldest first.")
    timestamps: str = setting("", "Column of their timestamps, for a model with times.")
    candidates: str = setting("", "Column of lists to score; by default the best of all items are found.")
    dense: str = setting("dense", "Column of dense features, for a DLRM: a list for each row.")
    k: int = setting(10, "Best items of each user.", 1, MOST)
    exclude_history: bool = setting(True, "Leave a user's history out of the best items.")
    batch: int = setting(256, "Users that are computed together.", 1, 2**20)
    part: int = setting(16_384, "Rows of a part, after which a killed run goes on.", 1, MOST)


@dataclass(frozen=True)
class Form:
    """What is read of a row and made of it.

    Args:
        lists: columns of lists that are read, and left out. values: those of one value, which are kept.
        answers: the columns `made`, from those that were read.
    """

    lists: tuple[str, ...]
    values: tuple[str, ...]
    made: Mapping[str, pa.DataType]
    answers: Callable[[dict[str, list[Any]]], dict[str, list[Any]]]


def score_file(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    predictor: Predictor,
    config: ScoreConfig,
    progress: Callable[[int, int], object] = lambda done, rows: None,
) -> int:
    """Write `source` with what the model gives for each row; returns rows.

    Of a model of the next item that are the columns ``items`` and ``scores``, or ``scores`` alone of
    candidates; of a DLRM ``probability``; of a GRM a column for each task, with a list for each row. Lists
    that were read are left out, other columns are kept, and rows stay in their order. ``scores`` and
    probabilities are float32, ``items`` int64 or words, as the histories are. `source` may be at a URL, `out`
    is local: its parts are beside it.

    A DLRM reads the column of each of its features, of lists for a pooled one. A GRM reads the columns of its
    context, and histories and candidates of structs: ``item``, ``timestamp``, in histories ``action``, and
    ``genres`` for a model with genres.

    Raises ValueError for a missing column, a row that the `Predictor` refuses, which is named, a setting that
    this model does not use, for a source that changes meanwhile, and for parts of another run: of another
    file, model or configuration.
    """
    out = local_path(out, "a file of scores")
    check_writable(out)
    place = files_at(str(place_of(source)), "Parquet file")
    if place.is_folder or len(place.files) > 1:
        raise ValueError(f"{source} has {len(place.files)} files: score one after another")
    if out.exists() and place.filesystem.type_name == "local" and out.samefile(place.files[0]):
        raise ValueError(f"the output would replace {source}, whose rows it has: name another file")
    file = _opened(place)
    names = file.schema_arrow.names
    form = _form(predictor, config, file.schema_arrow)
    wanted = [*form.lists, *form.values]
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(f"{source} has no column {missing[0]!r}, but {', '.join(names)}")
    if twice := next(
        (each for each in [*names, *wanted] if names.count(each) > 1 or wanted.count(each) > 1), ""
    ):
        raise ValueError(f"column {twice!r} is there or named twice: give each a name and a use of its own")
    for name in wanted:
        kind = file.schema_arrow.field(name).type
        if is_list(kind) != (name in form.lists):
            right = "a list" if name in form.lists else "one id or word"
            raise ValueError(f"column {name!r} of {source} has {kind}: give {right} for each row")
    if clash := form.made.keys() & ({*names} - {*form.lists}):
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
            scored = _scored(table, form, config.batch, first)
            with atomic_write(path) as written:
                pq.write_table(scored, written, write_page_checksum=True)
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


def _scored(table: pa.Table, form: Form, batch: int, first: int) -> pa.Table:
    made: dict[str, list[Any]] = {name: [] for name in form.made}
    for at in range(0, len(table), batch):
        part = table.slice(at, batch)
        columns = {name: part[name].to_pylist() for name in (*form.lists, *form.values)}
        try:
            found = _answers(columns, form)
        except ValueError:
            for row in range(len(part)):  # which one it is
                alone = {name: values[row : row + 1] for name, values in columns.items()}
                try:
                    _answers(alone, form)
                except ValueError as error:
                    raise ValueError(f"row {first + at + row}: {error}") from error
            raise
        for name, values in found.items():
            made[name] += values
    kept = table.drop_columns([*form.lists])
    for name, kind in form.made.items():
        kept = kept.append_column(name, pa.array(made[name], kind))
    return kept


def _answers(columns: dict[str, list[Any]], form: Form) -> dict[str, list[Any]]:
    for name in form.lists:
        if None in columns[name]:
            raise ValueError(f"column {name!r} has no list here")
    return form.answers(columns)


def _form(predictor: Predictor, config: ScoreConfig, schema: pa.Schema) -> Form:
    """How this model scores; ValueError for another kind of model, and for settings that it does not use."""
    kind = (predictor.manifest["dense"] or {}).get("kind")
    if kind == CLICK:
        _check_used(config, {"dense"}, "a model of clicks")
        return _clicks(predictor, config)
    if kind == IMPRESSION:
        _check_used(config, {"history", "candidates"}, "a model of impressions")
        return _impressions(predictor, config, schema)
    timed = predictor.dense_of(NEXT_ITEM, "score")["timestamps"]
    if config.timestamps and not timed:
        raise ValueError("timestamps has no meaning with a model without times: leave it out")
    if timed and not config.timestamps:
        raise ValueError("this model goes by times: name the column of the histories' timestamps")
    histories = {"history", "timestamps", "candidates"}
    if config.candidates:
        _check_used(config, histories, "candidates")
    else:
        _check_used(config, histories | {"k", "exclude_history"}, "a model of the next item")
        check_k(config.k, len(predictor.item_ids))
    return _next_items(predictor, config, schema)


def _check_used(config: ScoreConfig, used: set[str], what: str) -> None:
    plain = ScoreConfig()
    for name in vars(config).keys() - used - {"batch", "part"}:
        if getattr(config, name) != getattr(plain, name):
            raise ValueError(f"{name} has no meaning with {what}: leave it out")


def _clicks(predictor: Predictor, config: ScoreConfig) -> Form:
    facts, features = predictor.dense_of(CLICK, "score"), predictor.manifest["features"]
    pooled = [name for name in facts["features"] if features[name]["pooling"] != "none"]
    width = facts["dense"]

    def answers(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows = columns[config.dense] if width else [[]] * len(columns[facts["features"][0]])
        if any(len(row) != width or not all(isinstance(each, (int, float)) for each in row) for row in rows):
            raise ValueError(f"column {config.dense!r} must have {width} numbers in each row")
        dense = torch.tensor(rows, dtype=torch.float32, device="cpu").reshape(-1, width)
        if not bool(dense.isfinite().all()):
            raise ValueError(f"column {config.dense!r} must have finite float32")
        return {"probability": predictor.predict(dense, columns).tolist()}

    single = tuple(name for name in facts["features"] if name not in pooled)
    return Form((*[config.dense] * bool(width), *pooled), single, {"probability": pa.float32()}, answers)


def _impressions(predictor: Predictor, config: ScoreConfig, schema: pa.Schema) -> Form:
    facts = predictor.dense_of(IMPRESSION, "score")
    if not config.candidates:
        raise ValueError(
            "a model of impressions judges items that are shown: name their column as candidates"
        )
    shown = ["item", "timestamp", *["genres"] * facts["genres"]]
    lists = {config.history: [*shown, "action"], config.candidates: shown}
    for name, fields in lists.items():
        kind = schema.field(name).type if schema.names.count(name) == 1 else None
        if kind is None or not is_list(kind):
            continue  # it is named by the caller
        of_events = kind.value_type
        there = {each.name for each in of_events} if pa.types.is_struct(of_events) else set()
        if missing := [each for each in fields if each not in there]:
            raise ValueError(f"column {name!r} has lists of {of_events}, and no {missing[0]!r}: give structs")

    def answers(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        def events(name: str, row: int) -> list[SimpleNamespace]:
            found = columns[name][row]
            if any(each is None or each[field] is None for each in found for field in lists[name]):
                raise ValueError(f"column {name!r} has an event without {', '.join(lists[name])}")
            return [
                SimpleNamespace(**{"genres": []} | {field: each[field] for field in lists[name]})
                for each in found
            ]

        rows = range(len(columns[config.history]))
        samples = [
            SimpleNamespace(
                context={name: columns[name][row] for name in facts["context"]},
                history=events(config.history, row),
                exposed=events(config.candidates, row),
            )
            for row in rows
        ]
        batch = impressions_of(samples, facts, predictor.vocabularies)
        found = predictor.predict(batch).split(batch.exposed_offsets.diff().tolist())
        return {task: [each[:, at].tolist() for each in found] for at, task in enumerate(facts["tasks"])}

    made = dict.fromkeys(facts["tasks"], pa.list_(pa.float32()))
    return Form((config.history, config.candidates), tuple(facts["context"]), made, answers)


def _next_items(predictor: Predictor, config: ScoreConfig, schema: pa.Schema) -> Form:
    words = predictor.vocabularies.get("item")

    def answers(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        histories = columns[config.history]
        times = columns[config.timestamps] if config.timestamps else None
        if times is not None and [*map(len, histories)] != [*map(len, times)]:
            raise ValueError(
                f"columns {config.history!r} and {config.timestamps!r} have lists of other lengths"
            )
        given, stamps = predictor.read(histories, times)
        vectors = predictor.vectors(given.ids, given.offsets, stamps)
        if not config.candidates:
            exclude = "history" if config.exclude_history else None
            ids, found = predictor.best_of(vectors, config.k, exclude, given)
            return {"items": ids if isinstance(ids, list) else ids.tolist(), "scores": found.tolist()}
        wanted = [array_of(each, "list of candidates", words)[0] for each in columns[config.candidates]]
        rows = zip(vectors.split(1), wanted, strict=True)
        return {"scores": [predictor.scores_of(vector, ids)[0].tolist() for vector, ids in rows]}

    made = {"scores": pa.list_(pa.float32())}
    if not config.candidates:
        kind = schema.field(config.history).type if config.history in schema.names else None
        ids = kind is None or not is_list(kind) or pa.types.is_integer(kind.value_type)
        made = {"items": pa.list_(pa.int64() if ids else pa.string()), **made}
    read = (config.history, config.timestamps, config.candidates)
    return Form(tuple(name for name in read if name), (), made, answers)


def _join(files: list[Path], out: Path) -> None:
    """The parts, one row group each."""
    with pq.ParquetWriter(out, _read(files[0]).schema, write_page_checksum=True) as writer:
        for file in files:
            writer.write_table(_read(file))


def _read(part: Path) -> pa.Table:
    try:
        return pq.read_table(part, partitioning=None, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{part} is damaged ({error}): remove it, and call it again") from error
