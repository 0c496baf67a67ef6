"""Logs of events that are read in parts: Parquet, CSV and KuaiRand's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritonrec.data.features import ItemGenres, UserFeatures
from tritonrec.data.interactions import Interactions
from tritonrec.data.text_files import PACKED, text_files

if TYPE_CHECKING:
    import pyarrow.fs as pafs

Features = tuple[UserFeatures | None, ItemGenres | None]
TEXT_LOGS = ("csv", "kuairand")
ROW_BYTES = {"csv": 16, "kuairand": 60}
"""Of a short line; a fifth of it where the file is compressed."""


@dataclass(frozen=True)
class LogParts:
    """A log of events that is read in parts.

    Attributes:
        filesystem, files: of everything that is read; where a file changes, the log has changed.
        rows: an estimate, rather too large. parts: reads the log, in order. features: of users and items.
    """

    filesystem: pafs.FileSystem
    files: list[str]
    rows: Callable[[], int]
    parts: Callable[[], Iterator[Interactions]]
    features: Callable[[], Features]


def log_in_parts(source: str) -> LogParts:
    """The log at ``csv:PATH`` or ``kuairand:PATH``, or in Parquet at any other path.

    Raises the errors of finding the files of `tritonrec.data.csv_log`, `kuairand` and `parquet_rows`.
    """
    kind, _, path = source.partition(":")
    if kind == "csv":
        from tritonrec.data import csv_log

        filesystem, files = text_files(path)
        return LogParts(
            filesystem, files, lambda: _rows(kind, filesystem, files), lambda: csv_log.parts(path),
            lambda: (None, None),
        )  # fmt: skip
    if kind == "kuairand":
        from pyarrow.fs import LocalFileSystem

        from tritonrec.data import kuairand

        local, logs = LocalFileSystem(), list(map(str, kuairand.files(path)))
        beside = list(map(str, kuairand.features_files(path)))
        return LogParts(
            local, logs + beside, lambda: _rows(kind, local, logs), lambda: kuairand.parts(path),
            lambda: kuairand.features_beside(path),
        )  # fmt: skip
    return _parquet(source)


def _parquet(path: str) -> LogParts:
    from tritonrec.data import parquet
    from tritonrec.data.parquet_rows import ParquetRows, filesystem_of, shards

    filesystem, place = filesystem_of(path)
    root, files = shards(filesystem, place, path)
    beside = [f"{root.rstrip('/')}/{name}" for name in (parquet.USERS_FILE, parquet.ITEMS_FILE)]
    return LogParts(
        filesystem, files + beside, lambda: ParquetRows(path, ()).num_rows, lambda: parquet.parts(path),
        lambda: parquet.features_beside(path),
    )  # fmt: skip


def _rows(kind: str, filesystem: pafs.FileSystem, files: list[str]) -> int:
    """By the bytes of files of text."""
    found = filesystem.get_file_info(files)
    packed = sum(about.size or 0 for about in found if about.path.endswith(PACKED))
    plain = sum(about.size or 0 for about in found if not about.path.endswith(PACKED))
    return 1 + (plain + 5 * packed) // ROW_BYTES[kind]
