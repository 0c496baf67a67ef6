"""KuaiRand: videos watched in the Kuaishou app, with feedback (Gao et al., CIKM 2022).

Reads the published CSV files as they are (Pure, 1K and 27K have the same columns). A log has, among others::

    user_id,video_id,date,hourmin,time_ms,is_click,is_like,...,long_view,play_time_ms,duration_ms,...,tab
    3,1071,20220408,1600,1649408076860,1,0,...,1,175045,87433,...,1

The item is the video, the timestamp ``time_ms``, and the tasks are ``is_click`` and ``long_view``, or
``is_like`` in a file without it. Beside a log of a folder, ``user_features_*.csv`` gives contextual features
and ``video_features_basic_*.csv`` the tags of videos as genres; both may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

from tritonrec.data import text_files
from tritonrec.data.features import ItemGenres, UserFeatures, numbered
from tritonrec.data.interactions import Interactions
from tritonrec.data.parquet import concat
from tritonrec.data.parquet_rows import UNREADABLE

CONTEXT = (
    "user_active_degree",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
)


def read(path: Path | str) -> Interactions:
    """Read a log file, or ``log_standard_*.csv`` of a folder (or of its ``data``) in the order of names.

    Logs of random exposure (``log_random_*.csv``) are read by their own path only. Files may be compressed
    (``.csv.gz``). Raises FileNotFoundError where there is no log, and ValueError naming file and column of a
    bad value.
    """
    users, genres = features_beside(path)
    return replace(concat(list(parts(path))), user_features=users, genres=genres)


def files(path: Path | str) -> list[Path]:
    """The logs at a path, as `read` takes them, without its features; raises FileNotFoundError."""
    path = Path(path).expanduser()
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        return [path]
    folder = path / "data" if (path / "data").is_dir() else path
    if found := _named(folder, "log_standard_*.csv"):
        return found
    raise FileNotFoundError(f"{folder}: holds no log_standard_*.csv")


def features_files(path: Path | str) -> list[Path]:
    """The first file of users, and the first of videos, beside the logs of a folder, where there are any."""
    path = Path(path).expanduser()
    if not path.is_dir():
        return []
    folder = files(path)[0].parent
    kinds = ("user_features_*.csv", "video_features_basic_*.csv")
    return [found[0] for kind in kinds if (found := _named(folder, kind))]


def features_beside(path: Path | str) -> tuple[UserFeatures | None, ItemGenres | None]:
    """Features of users and tags of videos; None for those that are not there."""
    beside = {file.name[:4]: file for file in features_files(path)}
    users, videos = beside.get("user"), beside.get("vide")
    return _users(users) if users else None, _tags(videos) if videos else None


def parts(path: Path | str) -> Iterator[Interactions]:
    """The logs in parts, in the order of names and lines, without features; raises the errors of `read`."""
    logs = files(path)
    headers = [_columns(log) for log in logs]
    second = "long_view" if all("long_view" in names for names in headers) else "is_like"
    needed = ("user_id", "video_id", "time_ms", "is_click", second)
    for log, names in zip(logs, headers, strict=True):
        for name in needed:
            if name not in names:
                raise ValueError(f"{log}: no column {name!r}")
    rows = 0
    for log in logs:
        first = 0
        for table in _tables(log, needed, ()):
            tasks = {name: table[name] for name in ("is_click", second)}
            for name, column in tasks.items():
                if (wrong := (column != 0) & (column != 1)).any():
                    row = int(wrong.nonzero()[0][0])
                    raise ValueError(
                        f"{log}: column {name!r} must be 0 or 1, got {column[row]} in row {first + row}"
                    )
            yield Interactions(table["user_id"], table["video_id"], table["time_ms"], feedback=tasks)
            first += len(table["user_id"])
        rows += first
    if not rows:
        raise ValueError(f"{path}: holds no interactions")


def _named(folder: Path, pattern: str) -> list[Path]:
    """The files of a pattern, also where they are compressed, in the order of their names."""
    return sorted(file for end in ("", *text_files.PACKED) for file in folder.glob(pattern + end))


def _tables(path: Path, integers: tuple[str, ...], words: tuple[str, ...]) -> Iterator[dict[str, np.ndarray]]:
    """The given columns that the file has, as int64 and as strings, some rows at a time."""
    types = {name: pa.int64() for name in integers} | {name: pa.string() for name in words}
    options = pc.ConvertOptions(column_types=types, null_values=[], strings_can_be_null=False)
    options.include_columns = [name for name in types if name in _columns(path)]
    try:
        with pc.open_csv(path, _options(), convert_options=options) as reader:
            for batch in reader:
                yield {
                    name: batch.column(name).to_numpy(zero_copy_only=False)
                    for name in options.include_columns
                }
    except UNREADABLE as error:
        raise ValueError(f"{path}: {error}") from error


def _options() -> pc.ReadOptions:
    return pc.ReadOptions(use_threads=False, block_size=text_files.BLOCK_BYTES)


def _columns(path: Path) -> list[str]:
    try:
        with pc.open_csv(path, _options()) as reader:
            return reader.schema.names
    except UNREADABLE as error:
        raise ValueError(f"{path}: {error}") from error


def _table(path: Path, integers: tuple[str, ...], words: tuple[str, ...]) -> dict[str, np.ndarray]:
    """As `_tables`, all rows."""
    none = {name: np.empty(0, np.int64 if name in integers else object) for name in (*integers, *words)}
    found = {name: none[name] for name in _columns(path) if name in none}
    tables = [found, *_tables(path, integers, words)]
    return {name: np.concatenate([table[name] for table in tables]) for name in found}


def _users(path: Path) -> UserFeatures:
    table = _table(path, ("user_id",), CONTEXT)
    ids = _ids(path, table, "user_id")
    order = np.argsort(ids)
    columns = {name: numbered(table[name].tolist())[order] for name in CONTEXT if name in table}
    return UserFeatures(ids[order], columns)


def _tags(path: Path) -> ItemGenres:
    table = _table(path, ("video_id",), ("tag",))
    ids = _ids(path, table, "video_id")
    if "tag" not in table:
        raise ValueError(f"{path}: no column 'tag'")
    order = np.argsort(ids)
    bags = [[tag.strip() for tag in str(table["tag"][row]).split(",") if tag.strip()] for row in order]
    lengths = np.array([len(bag) for bag in bags], dtype=np.int64)
    tags = numbered([tag for bag in bags for tag in bag])
    return ItemGenres(ids[order], np.append(0, np.cumsum(lengths)), tags)


def _ids(path: Path, table: dict[str, np.ndarray], name: str) -> np.ndarray:
    if name not in table:
        raise ValueError(f"{path}: no column {name!r}")
    values, counts = np.unique(table[name], return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{path}: column {name!r} has {values[counts > 1][0]} twice")
    return table[name]
