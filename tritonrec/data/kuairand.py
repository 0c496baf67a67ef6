"""KuaiRand: videos watched in the Kuaishou app, with feedback (Gao et al., CIKM 2022).

The log is the preset ``kuairand`` (`tritonrec.data.presets`); here are the features beside it, of the
published CSV files as they are (Pure, 1K and 27K have the same columns). ``user_features_*.csv`` gives
contextual features and ``video_features_basic_*.csv`` the tags of videos as genres; both may be missing.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritonrec.data.interactions import ItemGenres, UserFeatures
from tritonrec.data.log_files import LogFiles, files_at
from tritonrec.data.log_format import LogFormat, named
from tritonrec.data.text_tables import CsvFile
from tritonrec.data.values import integers

CONTEXT = (
    "user_active_degree",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
)
FILES = ("user_features_*.csv", "video_features_basic_*.csv")


def files_beside(place: LogFiles) -> list[str]:
    """The first file of users, and the first of videos, beside the logs of a folder, where there are any."""
    return [file for file in _found(place) if file is not None]


def features_beside(place: LogFiles) -> tuple[UserFeatures | None, ItemGenres | None]:
    """Features of users and tags of videos; None for those that are not there.

    Raises ValueError naming file and column of a bad value.
    """
    users, videos = _found(place)
    return users and _users(place, users), videos and _tags(place, videos)  # type: ignore[return-value]


def _found(place: LogFiles) -> list[str | None]:
    if not place.is_folder:
        return [None, None]
    found: list[str | None] = []
    for pattern in FILES:
        try:
            found.append(files_at(place.root, filesystem=place.filesystem, patterns=(pattern,)).files[0])
        except FileNotFoundError:
            found.append(None)
    return found


def _table(
    place: LogFiles, path: str, id: str, words: tuple[str, ...]
) -> tuple[np.ndarray, dict[str, pa.Array]]:
    """The ids, which differ, and those of the columns of words that the file has."""
    file = CsvFile(place.filesystem, path, LogFormat(header="yes"))
    columns = [named(file.names, id, path), *(name for name in words if name in file.names)]
    parts = list(file.tables(columns))
    ids = [integers(part, columns[0], table.column(columns[0])) for part, table in parts]
    every = np.concatenate([np.empty(0, np.int64), *ids])
    found, counts = np.unique(every, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{path}: column {columns[0]!r} has {found[counts > 1][0]} twice")
    tables = pa.concat_tables([table for _part, table in parts]) if parts else None
    none = pa.array([], pa.string())
    return every, {
        name: pc.fill_null(tables.column(name), "").combine_chunks() if tables else none
        for name in columns[1:]
    }


def _users(place: LogFiles, path: str) -> UserFeatures:
    ids, table = _table(place, path, "user_id", CONTEXT)
    return UserFeatures.of_words(ids, {name: own.to_pylist() for name, own in table.items()})


def _tags(place: LogFiles, path: str) -> ItemGenres:
    ids, table = _table(place, path, "video_id", ("tag",))
    if "tag" not in table:
        raise ValueError(f"{path}: no column 'tag'")
    words = (own.split(",") for own in table["tag"].to_pylist())
    return ItemGenres.of_words(ids, [[tag.strip() for tag in own if tag.strip()] for own in words])
