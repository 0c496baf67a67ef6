"""Interaction logs as Parquet, in one file or many, Hive-partitioned or not.

::

    OUT/date=1997-09-20/part-00000.parquet      columns: user, item, timestamp    integers
    OUT/date=1997-09-20/part-00001.parquet               rating                   a number, if there is one
    OUT/date=1997-09-21/part-00000.parquet               any column of booleans   feedback: a task each
    OUT/_users.parquet, OUT/_items.parquet      features of users and items, if there are any

Files are read in the order of their paths, and row groups in their order, so a log written without partitions
keeps its order. Other columns are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from tritonrec.data.features import ItemGenres, UserFeatures
from tritonrec.data.interactions import Interactions
from tritonrec.data.parquet_rows import UNREADABLE, filesystem_of, shards
from tritonrec.data.sequences import holds_sequences

USERS_FILE, ITEMS_FILE = "_users.parquet", "_items.parquet"  # pyarrow ignores names with an underscore

_IDS = ("user", "item", "timestamp")
FRACTION = "timestamp_fraction"

Made = TypeVar("Made")


def read(path: Path | str) -> Interactions:
    """The whole log, with features of users and items; raises the errors of `parts`."""
    users, genres = features_beside(path)
    return replace(concat(list(parts(path))), user_features=users, genres=genres)


def features_beside(path: Path | str) -> tuple[UserFeatures | None, ItemGenres | None]:
    """Features of users and items in the folder of a dataset; None for those that are not there.

    Raises ValueError naming a file that cannot be read, or is of another form.
    """
    return _beside(path, USERS_FILE, _users), _beside(path, ITEMS_FILE, _genres)


def parts(path: Path | str) -> Iterator[Interactions]:
    """The row groups of a log, each a log of its own without features.

    Raises FileNotFoundError for a path that does not exist, and ValueError for a dataset without rows, and
    naming file and column for a missing column or another type than in the module's docstring.
    """
    filesystem, place = filesystem_of(str(path))
    _root, files = shards(filesystem, place, str(path))
    columns: list[str] = []
    footers = []
    for file in files:
        try:
            with filesystem.open_input_file(file) as source:
                found = pq.ParquetFile(source)
                columns = _columns(file, found.schema_arrow, files[0], columns)
                rows = [found.metadata.row_group(number).num_rows for number in range(found.num_row_groups)]
                footers.append((file, [number for number, count in enumerate(rows) if count]))
        except UNREADABLE as error:
            raise ValueError(f"{path}: not a Parquet dataset: {file}: {error}") from error
    if not any(groups for _file, groups in footers):
        raise ValueError(f"{path}: the dataset holds no rows")
    for file, groups in footers:
        for number in groups:
            try:
                with filesystem.open_input_file(file) as source:
                    table = pq.ParquetFile(source).read_row_group(number, columns=columns)
            except UNREADABLE as error:
                raise ValueError(f"{file}: row group {number} cannot be read: {error}") from error
            yield _interactions({name: _values(file, name, table.column(name)) for name in columns})


def concat(parts: Sequence[Interactions]) -> Interactions:
    """One log of several with the same columns, end to end, without features."""
    columns = [_columns_of(part) for part in parts]
    return _interactions({name: np.concatenate([part[name] for part in columns]) for name in columns[0]})


def _interactions(columns: dict[str, np.ndarray]) -> Interactions:
    feedback = {name: column for name, column in columns.items() if name not in (*_IDS, "rating", FRACTION)}
    return Interactions(
        columns["user"], columns["item"], columns["timestamp"], columns.get("rating"), feedback,
        fraction=columns.get(FRACTION),
    )  # fmt: skip


def _columns_of(log: Interactions) -> dict[str, np.ndarray]:
    columns = {"user": log.user, "item": log.item, "timestamp": log.timestamp}
    if log.rating is not None:
        columns["rating"] = log.rating
    if log.fraction is not None:
        columns[FRACTION] = log.fraction
    taken = set(columns) & set(log.feedback)
    if taken:
        raise ValueError(f"feedback cannot be called {min(taken)!r}: the name is taken")
    return columns | log.feedback


def table_of(log: Interactions) -> pa.Table:
    """The log as the columns of the module's docstring, without features."""
    columns = _columns_of(log)
    return pa.table(
        {name: column.astype(bool) if name in log.feedback else column for name, column in columns.items()}
    )


def write_features(log: Interactions, folder: Path) -> None:
    """Write the features of users and items beside the log."""
    if log.user_features is not None:
        users = {"user": log.user_features.user_ids} | log.user_features.columns
        pq.write_table(pa.table(users), folder / USERS_FILE)
    if log.genres is not None:
        genres = pa.LargeListArray.from_arrays(log.genres.offsets, log.genres.genres)
        pq.write_table(pa.table({"item": log.genres.item_ids, "genres": genres}), folder / ITEMS_FILE)


def _beside(path: Path | str, name: str, made: Callable[[str, pa.Table], Made]) -> Made | None:
    """What is `made` of a file in the folder of a dataset; None where there is none."""
    filesystem, place = filesystem_of(str(path))
    file = f"{place.rstrip('/')}/{name}"
    if filesystem.get_file_info(file).type != pafs.FileType.File:
        return None
    try:
        with filesystem.open_input_file(file) as source:
            table = pq.read_table(source)
        return made(file, table)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        known = str(error).startswith(file)
        raise ValueError(str(error) if known else f"{file} cannot be read: {error}") from error


def _users(file: str, table: pa.Table) -> UserFeatures:
    names = [name for name in table.column_names if name != "user"]
    values = {name: _values(file, name, table.column(name)) for name in ["user", *names]}
    return UserFeatures(values.pop("user"), values)


def _genres(file: str, table: pa.Table) -> ItemGenres:
    bags = table.column("genres").combine_chunks()
    if not (pa.types.is_list(bags.type) or pa.types.is_large_list(bags.type)):
        raise ValueError(f"column 'genres' must hold lists, got {bags.type}")
    lengths = bags.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    genres = bags.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    items = _values(file, "item", table.column("item"))
    return ItemGenres(items, np.append(0, np.cumsum(lengths)), genres)


def _columns(file: str, schema: pa.Schema, first: str, expected: list[str]) -> list[str]:
    """Names of the columns to read, those of the `first` file, where they are `expected`."""
    types = {field.name: field.type for field in schema}
    for name in _IDS:
        if name not in types:
            raise ValueError(f"{file}: no column {name!r}; found {', '.join(types)}")
        if not pa.types.is_integer(types[name]):
            hint = "; its rows are sequences, which hstu and fuxi stream" if holds_sequences(schema) else ""
            raise ValueError(f"{file}: column {name!r} must hold integers, got {types[name]}{hint}")
    names = list(_IDS)
    if "rating" in types:
        kind = types["rating"]
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise ValueError(f"{file}: column 'rating' must hold numbers, got {kind}")
        names.append("rating")
    if FRACTION in types and pa.types.is_floating(types[FRACTION]):
        names.append(FRACTION)
    names += [name for name, kind in types.items() if pa.types.is_boolean(kind)]
    expected = expected or names
    if sorted(names) != sorted(expected):
        raise ValueError(
            f"{file}: has the columns {', '.join(sorted(names))}, "
            f"but {first} has {', '.join(sorted(expected))}"
        )
    return expected


def _values(path: str, name: str, column: pa.ChunkedArray) -> np.ndarray:
    """float64 for a rating and a fraction, else int64."""
    if column.null_count:
        raise ValueError(f"{path}: column {name!r} has {column.null_count} nulls")
    try:
        values = column.cast(pa.float64() if name in ("rating", FRACTION) else pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: column {name!r} does not fit: {error}") from error
    if name in ("rating", FRACTION) and not np.isfinite(values).all():
        raise ValueError(f"{path}: column {name!r} has a value that is not finite")
    return values
