"""Parquet shards as one sequence of rows: which row group has which rows, and reading of any stretch of them.

A dataset is a file, a folder of files at any depth, or a glob, in the local file system or at a URL
(``s3://``, ``gs://``, ``hdfs://``, and whatever fsspec knows). Files are taken in the order of their paths
and row groups in their order; a row's number is its place in this order. Names that begin with ``_`` or ``.``
are no shards, nor are files in such folders. Any compression of Parquet will do.

Opening a dataset reads the footers of its files. `RowReader` reads pages as it decodes them, so its memory is
that of a few hundred rows and of a page of each column, not of a row group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from tritonrec.data.slices import work
from tritonrec.data.stream_plan import Stretch

FOOTER_THREADS = 16
BUFFER_BYTES = 1 << 16
"""Of each column of a row group that is being read."""
BATCH_ROWS = 256
"""Rows that are decoded at once."""
KEPT_CHUNKS = 100_000
"""Column chunks whose places are kept in memory, of the files used last; other footers are read again."""
UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""Errors of pyarrow for a file that it cannot read, or that has names in no UTF-8."""


@dataclass
class ReadCounts:
    """What a reader has read: bytes of files, footers included, and rows that it decoded."""

    bytes: int = 0
    rows: int = 0


class ParquetRows:
    """The rows of a Parquet dataset.

    Args:
        path: a file, a folder or a glob (``logs/*/part-*.parquet``), local or a URL.
        columns: that are read; None: all.
        filesystem: pyarrow's or fsspec's; by default that of the path.

    Attributes:
        schema: of `columns`, the same in every file. files: paths in their order.
        root: the folder below which they are.
        group_rows: (G,) int64 rows of each row group; those without rows are left out. file_rows: (G,) int64
            of each in its file, more than that where `first` has cut it.
        group_file, group_number: (G,) int64 file of each, and its number there.
        first_rows: (G,) int64 number of the first row of each.

    Raises FileNotFoundError for a path that does not exist, and ValueError for a dataset without rows, and
    naming the file that is no Parquet, that lacks a column or has one of another type than the first file.
    """

    def __init__(
        self,
        path: str | Path,
        columns: Sequence[str] | None = None,
        filesystem: Any = None,
    ) -> None:
        self.path = str(path)
        self.filesystem, place = filesystem_of(self.path, filesystem)
        self.root, self.files = shards(self.filesystem, place, self.path)
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._chunks = 0
        footers = []
        with ThreadPoolExecutor(FOOTER_THREADS) as pool:
            for file, (schema, about) in zip(self.files, pool.map(self._footer, self.files), strict=True):
                sizes = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
                footers.append((schema, sizes))
                self.keep_footer(file, about)
        self.schema = self._checked([schema for schema, _sizes in footers], columns)
        self.columns = self.schema.names
        groups = [
            (file, number, rows)
            for file, (_schema, sizes) in enumerate(footers)
            for number, rows in enumerate(sizes)
            if rows
        ]
        if not groups:
            raise ValueError(f"{self.path}: the dataset holds no rows")
        self.group_file, self.group_number, self.group_rows = np.array(groups, dtype=np.int64).T
        self.file_rows = self.group_rows
        self.first_rows = np.cumsum(self.group_rows) - self.group_rows

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return int(self.group_rows.sum())

    def first(self, rows: int) -> ParquetRows:
        """The dataset of the first `rows` of these, at least one."""
        part = copy(self)
        groups = int(np.searchsorted(self.first_rows, rows))
        for name in ("group_file", "group_number", "group_rows", "file_rows", "first_rows"):
            setattr(part, name, getattr(self, name)[:groups].copy())
        part.group_rows[-1] = min(rows - part.first_rows[-1], part.group_rows[-1])
        return part

    @property
    def fingerprint(self) -> str:
        """The same for the same files, by name below the path, with the same row groups."""
        digest = sha256()
        for file in self.files:
            digest.update(f"{_below(self.root, file)}\n".encode())
        for column in (self.group_file, self.group_number, self.group_rows):
            digest.update(column.tobytes())
        return digest.hexdigest()[:16]

    def numbers(self, stretch: Stretch) -> np.ndarray:
        """(n,) int64: the rows' numbers."""
        return np.arange(stretch.first, stretch.last, dtype=np.int64) + self.first_rows[stretch.group]

    def stretches(self, groups: Sequence[int] | np.ndarray) -> Iterator[Stretch]:
        """All rows of `groups`, in their order."""
        for group in groups:
            yield Stretch(int(group), 0, int(self.group_rows[group]))

    def batches(self, rows: int = BATCH_ROWS, begin: int = 0) -> Iterator[tuple[np.ndarray, pa.Table]]:
        """The rows from `begin` on in their order, at most `rows` at a time and never of two row groups:
        numbers, table.
        """
        reader = RowReader(self)
        for whole in self.stretches(range(len(self.group_rows))):
            for first in range(max(begin - int(self.first_rows[whole.group]), 0), whole.last, rows):
                part = Stretch(whole.group, first, min(first + rows, whole.last))
                yield self.numbers(part), reader.read(part)

    def keep_footer(self, file: str, about: pq.FileMetaData) -> None:
        """Keep a footer, unless it is kept already, and forget those used least recently."""
        if file in self._footers:
            return
        self._footers[file] = about
        self._chunks += about.num_row_groups * about.num_columns
        while self._chunks > KEPT_CHUNKS and len(self._footers) > 1:
            _file, gone = self._footers.popitem(last=False)
            self._chunks -= gone.num_row_groups * gone.num_columns

    def kept_footer(self, file: str) -> pq.FileMetaData | None:
        """The footer of a file, if it is kept."""
        if file in self._footers:
            self._footers.move_to_end(file)
        return self._footers.get(file)

    def _footer(self, file: str) -> tuple[pa.Schema, pq.FileMetaData]:
        try:
            with self.filesystem.open_input_file(file) as source:
                found = pq.ParquetFile(source)
                return found.schema_arrow.remove_metadata(), found.metadata
        except UNREADABLE as error:
            raise ValueError(f"{self.path}: not a Parquet dataset: {file}: {error}") from error

    def _checked(self, schemas: list[pa.Schema], columns: Sequence[str] | None) -> pa.Schema:
        first = schemas[0] if columns is None else None
        for file, schema in zip(self.files, schemas, strict=True):
            for name in first.names if columns is None and first is not None else columns or ():
                if name not in schema.names:
                    raise ValueError(f"{file}: no column {name!r}; found {', '.join(schema.names)}")
            chosen = schema if columns is None else pa.schema([schema.field(name) for name in columns])
            first = first or chosen
            for field in first:
                if schema.field(field.name).type != field.type:
                    raise ValueError(
                        f"{file}: column {field.name!r} is {schema.field(field.name).type}, but "
                        f"{field.type} in {self.files[0]}"
                    )
        assert first is not None
        return first


class RowReader:
    """Reads stretches of rows one after another, and goes on in a row group where the last one ended.

    Args:
        counts: of what is read, which readers may share.
    """

    def __init__(self, rows: ParquetRows, counts: ReadCounts | None = None) -> None:
        self.rows, self.counts = rows, counts or ReadCounts()
        self._group, self._at = -1, 0
        self._source: _CountedFile | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None

    def read(self, *stretches: Stretch) -> pa.Table:
        """The rows of the stretches, in their order; an error names the file and its row group."""
        parts: list[pa.RecordBatch] = []
        for stretch in stretches:
            number = int(self.rows.group_number[stretch.group])
            file = self.rows.files[self.rows.group_file[stretch.group]]
            try:
                with work("decode"):
                    parts += self._read(stretch, file, number)
            except UNREADABLE as error:
                self.close()
                raise ValueError(f"{file}: row group {number} cannot be read: {error}") from error
        return pa.Table.from_batches(parts, self.rows.schema)

    def close(self) -> None:
        """Close the file that is open."""
        if self._source is not None:
            self._source.close()
        self._group, self._source, self._batches, self._rest = -1, None, iter(()), None

    def _read(self, stretch: Stretch, file: str, number: int) -> Iterator[pa.RecordBatch]:
        if stretch.group != self._group or stretch.first < self._at:
            self._open(stretch.group, file, number)
        while self._at < stretch.last:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                raise OSError(f"it ends before row {stretch.last}")
            skipped = min(max(stretch.first - self._at, 0), len(batch))
            taken = min(stretch.last - self._at, len(batch)) - skipped
            if taken:
                yield batch.slice(skipped, taken)
            self._at += skipped + taken
            left = len(batch) - skipped - taken
            self._rest = batch.slice(skipped + taken) if left else None

    def _open(self, group: int, file: str, number: int) -> None:
        self.close()
        self._source = _CountedFile(self.rows.filesystem.open_input_file(file), self.counts)
        found = pq.ParquetFile(
            pa.PythonFile(self._source, mode="r"),
            metadata=self.rows.kept_footer(file),
            buffer_size=BUFFER_BYTES,
            pre_buffer=False,
        )
        self.rows.keep_footer(file, found.metadata)
        about = found.metadata.row_group(number)
        if about.num_rows != self.rows.file_rows[group]:
            raise OSError(f"it has {about.num_rows} rows, and had {self.rows.file_rows[group]} before")
        self.counts.rows += about.num_rows
        self._batches = found.iter_batches(
            BATCH_ROWS, row_groups=[number], columns=self.rows.columns, use_threads=False
        )
        self._group, self._at = group, 0


class _CountedFile:
    """A file for pyarrow, whose reads are counted and are slices of the trace."""

    def __init__(self, file: pa.NativeFile, counts: ReadCounts) -> None:
        self._file, self._counts = file, counts

    def read(self, size: int = -1) -> bytes:
        with work("read"):
            data = self._file.read(None if size < 0 else size)
        self._counts.bytes += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def size(self) -> int:
        return self._file.size()

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed


def filesystem_of(path: str, filesystem: Any = None) -> tuple[pafs.FileSystem, str]:
    """The file system of a path, and the path there.

    pyarrow's own where it has one for the URL, else fsspec's. Raises ValueError for an unknown protocol.
    """
    if filesystem is not None:
        is_arrow = isinstance(filesystem, pafs.FileSystem)
        return filesystem if is_arrow else pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path
    if "://" not in path:
        return pafs.LocalFileSystem(), str(Path(path).expanduser())
    base, wild = _without_wildcards(path)
    try:
        found, place = pafs.FileSystem.from_uri(base)
        return found, "/".join([place.rstrip("/"), *wild])
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass
    try:
        import fsspec

        fs, place = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(fs)), place


def schema_of(path: str) -> pa.Schema:
    """The schema of a dataset's first file; raises the errors of `ParquetRows`."""
    filesystem, place = filesystem_of(path)
    (file, *_others) = shards(filesystem, place, path)[1]
    try:
        with filesystem.open_input_file(file) as source:
            return pq.read_schema(source)
    except UNREADABLE as error:
        raise ValueError(f"{path}: not a Parquet dataset: {file}: {error}") from error


def _without_wildcards(path: str) -> tuple[str, list[str]]:
    """The folders before the first part with a wildcard, and the parts from there on."""
    parts = path.split("/")
    wild = next((place for place, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    return "/".join(parts[:wild]), parts[wild:]


def _below(folder: str, file: str) -> str:
    """The path of a file from its folder on; some file systems add a slash in front."""
    return file.strip("/").removeprefix(folder.strip("/")).strip("/")


def shards(
    filesystem: pafs.FileSystem, place: str, path: str, kind: str = "Parquet file"
) -> tuple[str, list[str]]:
    """The folder of a dataset, and its files, sorted; errors name `path`, and the `kind` of files."""
    base, wild = _without_wildcards(place)
    try:
        about = filesystem.get_file_info(base or "/")
        if about.type == pafs.FileType.NotFound:
            raise FileNotFoundError(f"{path}: no such file or folder")
        if about.type == pafs.FileType.File and not wild:
            return base.rpartition("/")[0], [base]
        found = filesystem.get_file_info(pafs.FileSelector(base or "/", recursive=True))
    except pa.ArrowException as error:
        raise ValueError(f"{path}: {error}") from error
    files = []
    for info in found:
        below = _below(base, info.path).split("/")
        if info.type != pafs.FileType.File or any(part[:1] in ("_", ".") for part in below):
            continue
        if not wild or (len(wild) == len(below) and all(map(fnmatchcase, below, wild))):
            files.append(info.path)
    if not files:
        raise ValueError(f"{path}: the dataset holds no {kind}")
    return base, sorted(files)
