"""Interaction logs as Parquet, in one file or many, Hive-partitioned or not.

::

    OUT/date=1997-09-20/part-00000.parquet      columns: user, item, timestamp    integers
    OUT/date=1997-09-20/part-00001.parquet               rating                   a number, if there is one
    OUT/date=1997-09-21/part-00000.parquet               any column of booleans   feedback: a task each
    OUT/_users.parquet, OUT/_items.parquet      features of users and items, if there are any

Files are read in the order of their paths, and row groups in their order, so a log written without partitions
keeps its order. Other columns, those of the partitions included, are ignored.

A shard is a row group. `ParquetShards` assigns shard s to rank s modulo the world size, and reads a rank's
shards in order on a thread ahead of the consumer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tritonrec.data.epochs import check_at_least
from tritonrec.data.features import ItemGenres, UserFeatures
from tritonrec.data.interactions import Interactions
from tritonrec.data.prefetch import prefetch

USERS_FILE, ITEMS_FILE = "_users.parquet", "_items.parquet"  # pyarrow ignores names with an underscore

_IDS = ("user", "item", "timestamp")


@dataclass(frozen=True)
class Shard:
    """One row group of one file."""

    path: str
    row_group: int
    rows: int


class ParquetShards:
    """The row groups of a dataset that belong to one rank, each as an `Interactions`.

    Args:
        path: a file, or a folder of files at any depth.
        rank, world_size: of the shards. depth: number of shards to read ahead.

    Raises FileNotFoundError for a path that does not exist, and ValueError for a dataset without rows, and
    naming file and column for a missing column or another type than in the module's docstring.
    """

    def __init__(self, path: Path | str, rank: int = 0, world_size: int = 1, depth: int = 2) -> None:
        check_at_least("world_size", world_size, 1)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        check_at_least("depth", depth, 1)
        self.depth = depth
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        try:
            dataset = ds.dataset(path, format="parquet", partitioning="hive")
            fragments = sorted(dataset.get_fragments(), key=lambda fragment: fragment.path)
            self.columns = _columns(path, fragments)
            everything = [
                Shard(fragment.path, group.id, group.num_rows)
                for fragment in fragments
                for group in fragment.row_groups
                if group.num_rows
            ]
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path}: not a Parquet dataset: {error}") from error
        if not everything:
            raise ValueError(f"{path}: the dataset holds no rows")
        self.shards = everything[rank::world_size]

    def __len__(self) -> int:
        return len(self.shards)

    def __iter__(self) -> Iterator[Interactions]:
        return self.read()

    def read(self, first: int = 0) -> Iterator[Interactions]:
        """This rank's shards from number `first` on, read ahead; errors name file and column."""
        check_at_least("first", first, 0)
        return prefetch((self.read_shard(shard) for shard in self.shards[first:]), self.depth)

    def read_shard(self, shard: Shard) -> Interactions:
        """Read one shard."""
        try:
            table = pq.ParquetFile(shard.path).read_row_group(shard.row_group, columns=self.columns)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{shard.path}: row group {shard.row_group} cannot be read: {error}") from error
        found = {name: _values(shard.path, name, table.column(name)) for name in self.columns}
        return _interactions(found)


def read(path: Path | str) -> Interactions:
    """The whole log, with features of users and items; raises the errors of `ParquetShards`."""
    log = concat(list(ParquetShards(path)))
    users, items = Path(path) / USERS_FILE, Path(path) / ITEMS_FILE
    return replace(
        log,
        user_features=_read_users(users) if users.exists() else None,
        genres=_read_genres(items) if items.exists() else None,
    )


def concat(parts: Sequence[Interactions]) -> Interactions:
    """One log of several with the same columns, end to end, without features."""
    columns = [_columns_of(part) for part in parts]
    return _interactions({name: np.concatenate([part[name] for part in columns]) for name in columns[0]})


def _interactions(columns: dict[str, np.ndarray]) -> Interactions:
    feedback = {name: column for name, column in columns.items() if name not in (*_IDS, "rating")}
    return Interactions(
        columns["user"], columns["item"], columns["timestamp"], columns.get("rating"), feedback
    )


def _columns_of(log: Interactions) -> dict[str, np.ndarray]:
    columns = {"user": log.user, "item": log.item, "timestamp": log.timestamp}
    if log.rating is not None:
        columns["rating"] = log.rating
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


def _read_users(path: Path) -> UserFeatures:
    table = pq.read_table(path, partitioning=None)
    names = [name for name in table.column_names if name != "user"]
    values = {name: _values(str(path), name, table.column(name)) for name in ["user", *names]}
    return UserFeatures(values.pop("user"), values)


def _read_genres(path: Path) -> ItemGenres:
    table = pq.read_table(path, partitioning=None)
    bags = table.column("genres").combine_chunks()
    lengths = bags.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    genres = bags.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    items = _values(str(path), "item", table.column("item"))
    return ItemGenres(items, np.append(0, np.cumsum(lengths)), genres)


def _columns(path: Path, fragments: Sequence[Any]) -> list[str]:
    """Names of the columns to read, checked in the schema of every file."""
    if not fragments:
        raise ValueError(f"{path}: the dataset holds no Parquet file")
    expected: list[str] = []
    for fragment in fragments:
        types = {field.name: field.type for field in fragment.physical_schema}
        for name in _IDS:
            if name not in types:
                raise ValueError(f"{fragment.path}: no column {name!r}; found {', '.join(types)}")
            if not pa.types.is_integer(types[name]):
                raise ValueError(f"{fragment.path}: column {name!r} must hold integers, got {types[name]}")
        names = list(_IDS)
        if "rating" in types:
            kind = types["rating"]
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
                raise ValueError(f"{fragment.path}: column 'rating' must hold numbers, got {kind}")
            names.append("rating")
        names += [name for name, kind in types.items() if pa.types.is_boolean(kind)]
        expected = expected or names
        if sorted(names) != sorted(expected):
            raise ValueError(
                f"{fragment.path}: has the columns {', '.join(sorted(names))}, "
                f"but {fragments[0].path} has {', '.join(sorted(expected))}"
            )
    return expected


def _values(path: str, name: str, column: pa.ChunkedArray) -> np.ndarray:
    """float64 for a rating, else int64."""
    if column.null_count:
        raise ValueError(f"{path}: column {name!r} has {column.null_count} nulls")
    try:
        values = column.cast(pa.float64() if name == "rating" else pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: column {name!r} does not fit: {error}") from error
    if name == "rating" and not np.isfinite(values).all():
        raise ValueError(f"{path}: column 'rating' has a value that is not finite")
    return values
