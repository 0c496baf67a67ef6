"""KuaiRand: videos watched in the Kuaishou app, with feedback (Gao et al., CIKM 2022).

Reads the published CSV files as they are (Pure, 1K and 27K have the same columns). A log has, among others::

    user_id,video_id,date,hourmin,time_ms,is_click,is_like,...,long_view,play_time_ms,duration_ms,...,tab
    3,1071,20220408,1600,1649408076860,1,0,...,1,175045,87433,...,1

The item is the video, the timestamp ``time_ms``, and the tasks are ``is_click`` and ``long_view``, or
``is_like`` in a file without it. Beside a log of a folder, ``user_features_*.csv`` gives contextual features
and ``video_features_basic_*.csv`` the tags of videos as genres; both may be missing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

from tritonrec.data.features import ItemGenres, UserFeatures, numbered
from tritonrec.data.interactions import Interactions

CONTEXT = (
    "user_active_degree",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
)

_INTEGERS = ("user_id", "video_id", "time_ms", "is_click", "long_view", "is_like")


def read(path: Path | str) -> Interactions:
    """Read a log file, or ``log_standard_*.csv`` of a folder (or of its ``data``) in the order of names.

    Logs of random exposure (``log_random_*.csv``) are read by their own path only. Raises FileNotFoundError
    where there is no log, and ValueError naming file and column of a bad value.
    """
    path = Path(path)
    logs = [path]
    if path.is_dir():
        folder = path / "data" if (path / "data").is_dir() else path
        logs = sorted(folder.glob("log_standard_*.csv"))
        if not logs:
            raise FileNotFoundError(f"{folder}: holds no log_standard_*.csv")
    elif not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    tables = [_table(log, _INTEGERS, ()) for log in logs]
    second = "long_view" if all("long_view" in table for table in tables) else "is_like"
    for log, table in zip(logs, tables, strict=True):
        for name in ("user_id", "video_id", "time_ms", "is_click", second):
            if name not in table:
                raise ValueError(f"{log}: no column {name!r}")
        for name in ("is_click", second):
            wrong = (table[name] != 0) & (table[name] != 1)
            if wrong.any():
                row = int(wrong.nonzero()[0][0])
                raise ValueError(
                    f"{log}: column {name!r} must be 0 or 1, got {table[name][row]} in row {row}"
                )
    joined = {
        name: np.concatenate([table[name] for table in tables])
        for name in ("user_id", "video_id", "time_ms", "is_click", second)
    }
    if len(joined["user_id"]) == 0:
        raise ValueError(f"{path}: holds no interactions")
    users = sorted(logs[0].parent.glob("user_features_*.csv")) if path.is_dir() else []
    videos = sorted(logs[0].parent.glob("video_features_basic_*.csv")) if path.is_dir() else []
    return Interactions(
        joined["user_id"],
        joined["video_id"],
        joined["time_ms"],
        feedback={name: joined[name] for name in ("is_click", second)},
        user_features=_users(users[0]) if users else None,
        genres=_tags(videos[0]) if videos else None,
    )


def _table(path: Path, integers: tuple[str, ...], words: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The given columns that the file has, as int64 and as strings."""
    types = {name: pa.int64() for name in integers} | {name: pa.string() for name in words}
    options = pc.ConvertOptions(column_types=types, null_values=[], strings_can_be_null=False)
    try:
        header = pc.open_csv(path, convert_options=options).schema.names
        options.include_columns = [name for name in types if name in header]
        table = pc.read_csv(path, convert_options=options)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: {error}") from error
    return {name: table.column(name).to_numpy() for name in table.column_names}


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
