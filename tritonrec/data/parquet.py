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

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tritonrec.data.interactions import Interactions, ItemGenres, UserFeatures
from tritonrec.data.log_files import LogFiles, is_there
from tritonrec.data.tables import is_metadata
from tritonrec.data.times import lists
from tritonrec.data.values import Part, integers

USERS_FILE, ITEMS_FILE = "_users.parquet", "_items.parquet"  # pyarrow ignores names with an underscore

_IDS = ("user", "item", "timestamp")
FRACTION = "timestamp_fraction"
TIME_UNIT = b"tritonrec.time_unit"
"""Metadata of the column of times."""

Made = TypeVar("Made")


def files_beside(place: LogFiles) -> list[str]:
    """The files of features in a folder, which may not be there."""
    return [f"{place.root.rstrip('/')}/{name}" for name in (USERS_FILE, ITEMS_FILE)]


def features_beside(place: LogFiles) -> tuple[UserFeatures | None, ItemGenres | None]:
    """Features of users and items in the folder of a dataset; None for those that are not there.

    Raises ValueError naming a file that cannot be read, or is of another form.
    """
    if not place.is_folder:
        return None, None
    users, items = files_beside(place)
    return _beside(place, users, _users), _beside(place, items, _genres)


def concat(parts: Sequence[Interactions]) -> Interactions:
    """One log of several with the same columns, end to end, without features."""
    if len(parts) == 1 and parts[0].user_features is None and parts[0].genres is None:
        return parts[0]
    fractions = [np.zeros(len(part)) if part.fraction is None else part.fraction for part in parts]
    ratings = [part.rating for part in parts if part.rating is not None]
    user, item, time = (np.concatenate([getattr(part, name) for part in parts]) for name in _IDS)
    return Interactions(
        user, item, time, np.concatenate(ratings) if ratings else None,
        {name: np.concatenate([part.feedback[name] for part in parts]) for name in parts[0].feedback},
        fraction=np.concatenate(fractions) if any(part.fraction is not None for part in parts) else None,
    )  # fmt: skip


def _columns_of(log: Interactions, has_fraction: bool) -> dict[str, np.ndarray]:
    columns = {"user": log.user, "item": log.item, "timestamp": log.timestamp}
    if log.rating is not None:
        columns["rating"] = log.rating
    if has_fraction:
        columns[FRACTION] = np.zeros(len(log)) if log.fraction is None else log.fraction
    taken = set(columns) & set(log.feedback)
    if taken:
        raise ValueError(f"feedback cannot be called {min(taken)!r}: the name is taken")
    return columns | log.feedback


def table_of(log: Interactions, has_fraction: bool | None = None) -> pa.Table:
    """The log as the columns of the module's docstring, without features.

    Args:
        has_fraction: of times, as a column; by default where the log has one.
    """
    columns = _columns_of(log, log.fraction is not None if has_fraction is None else has_fraction)
    table = pa.table(
        {name: column.astype(bool) if name in log.feedback else column for name, column in columns.items()}
    )
    place = table.schema.get_field_index("timestamp")
    field = table.schema.field(place).with_metadata({TIME_UNIT: log.time_unit})
    return table.cast(table.schema.set(place, field))


def write_features(log: Interactions, folder: Path) -> None:
    """Write the features of users and items beside the log."""
    if log.user_features is not None:
        users = {"user": log.user_features.user_ids} | log.user_features.columns
        pq.write_table(pa.table(users), folder / USERS_FILE, write_page_checksum=True)
    if log.genres is not None:
        genres = pa.LargeListArray.from_arrays(log.genres.offsets, log.genres.genres)
        pq.write_table(
            pa.table({"item": log.genres.item_ids, "genres": genres}),
            folder / ITEMS_FILE,
            write_page_checksum=True,
        )


def _beside(place: LogFiles, file: str, made: Callable[[str, pa.Table], Made]) -> Made | None:
    """What is `made` of a file in the folder of a dataset; None where there is none."""
    if not is_there(place.filesystem, file):
        return None
    try:
        with place.filesystem.open_input_file(file) as source:
            table = pq.read_table(source, page_checksum_verification=True)
        return made(file, table)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        known = str(error).startswith(file)
        raise ValueError(str(error) if known else f"{file} cannot be read: {error}") from error


def _users(file: str, table: pa.Table) -> UserFeatures:
    names = [name for name in table.column_names if name != "user" and not is_metadata(name)]
    found = {name: integers(Part(file, "row", 0), name, table.column(name)) for name in ["user", *names]}
    return UserFeatures(found.pop("user"), found)


def _genres(file: str, table: pa.Table) -> ItemGenres:
    part = Part(file, "row", 0)
    genres, lengths = lists(part, "genres", table.column("genres"))
    return ItemGenres(integers(part, "item", table.column("item")), np.append(0, np.cumsum(lengths)), genres)
