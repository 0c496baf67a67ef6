"""Parquet shards as one sequence of rows: which row group has which rows, and reading of any stretch of them.

A dataset is a file, a folder of files at any depth, or a glob (`tritonrec.data.log_files`). Files are taken
in the natural order of their paths and row groups in their order; a row's number is its place in this order.
Any compression of Parquet will do.

Opening a dataset reads the footers of its files. `RowReader` reads pages as it decodes them, so its memory is
that of a few hundred rows and of a page of each column, not of a row group.

A reader decodes a row group from its first row on: pyarrow cannot seek in it. Readers that divide one, such
as the only group of a file that pyarrow wrote by default, would decode it again and again (``-``: rows that
are decoded and dropped). `DecodedGroups` decodes it once, into a file that all of them read::

    row group             [ a a a a a a ]
    decoded by reader 0     0 0                 once:  a a a a a a  ->  Arrow file
    decoded by reader 1     - - 1 1
    decoded by reader 2     - - - - 2 2
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tritonrec.data.log_files import below_folder, files_at
from tritonrec.data.movielens import cache_directory
from tritonrec.data.slices import work
from tritonrec.data.stream_plan import Stretch
from tritonrec.data.tables import Frame, ParquetFile, common_schema, is_frame
from tritonrec.data.text_tables import UNREADABLE
from tritonrec.data.values import is_date, is_integer, is_list, plain
from tritonrec.files import ScratchFolder, in_memory
from tritonrec.files.write_back import WriteBack
from tritonrec.settings import typed

FOOTER_THREADS = 16
BUFFER_BYTES = 1 << 16
"""Of each column of a row group that is being read."""
BATCH_ROWS = 256
"""Rows that are decoded at once by default."""
KEPT_CHUNKS = 100_000
"""Column chunks whose places are kept in memory, of the files used last; other footers are read again."""
FRAME_ROWS = 1 << 13
"""Rows of a row group of a frame."""
MOST_DECODED = 4 << 30
"""Bytes of `DecodedGroups` by default."""


@dataclass
class ReadCounts:
    """What a reader has read: bytes of files, footers included, and rows that it decoded."""

    bytes: int = 0
    rows: int = 0


class ParquetRows:
    """The rows of a Parquet dataset.

    Args:
        path: a file, a folder or a glob (``logs/*/part-*.parquet``), local or a URL; or a frame in memory,
            which is written as Parquet into a folder of this process.
        columns: that are read; None: all.
        filesystem: pyarrow's or fsspec's; by default that of the path.

    Attributes:
        schema: of `columns`, in plain types that take the values of every file. files: paths in their order.
        root: the folder below which they are.
        group_rows: (G,) int64 rows of each row group; those without rows are left out. file_rows: (G,) int64
            of each in its file, more than that where `first` has cut it.
        group_file, group_number: (G,) int64 file of each, and its number there.
        first_rows: (G,) int64 number of the first row of each.
        content: digest of what the footers tell of the values: their numbers, the least and the greatest.

    Raises FileNotFoundError for a path that does not exist, and ValueError for a dataset without rows, and
    naming the file that is no Parquet, that lacks a column or has one of another kind than the first file.
    """

    @typed
    def __init__(self, path: Any, columns: Sequence[str] | None = None, filesystem: Any = None) -> None:
        self._folder: ScratchFolder | None = None
        if is_frame(path):
            path, self._folder = _written(path)
        self.path = str(path)
        place = files_at(self.path, "Parquet file", filesystem)
        self.filesystem, self.root, self.files = place.filesystem, place.root, place.files
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._chunks = 0
        footers, content = [], sha256()
        with ThreadPoolExecutor(FOOTER_THREADS) as pool:
            for file, (schema, about) in zip(self.files, pool.map(self._footer, self.files), strict=True):
                sizes = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
                footers.append((schema, sizes))
                with self._named(file):  # a damaged name of a column is found here
                    for chunk in _values(about, columns):
                        content.update(repr(chunk).encode())
                self.keep_footer(file, about)
        self.content = content.hexdigest()[:16]
        self.schema = common_schema(self.files, [schema for schema, _sizes in footers], columns)
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

    def check(self, lists: Sequence[str], ids: Sequence[str], hint: str) -> None:
        """Raise ValueError unless there are such columns; of a wrong type the `hint` says who writes it."""
        for name in (*lists, *ids):
            if name not in self.schema.names:
                raise ValueError(f"{self.path}: no column {name!r}; found {', '.join(self.schema.names)}")
            kind = self.schema.field(name).type
            found = kind.value_type if is_list(kind) else kind
            if is_list(kind) != (name in lists) or not (
                is_integer(found) or pa.types.is_string(found) or (is_date(found) and name in lists)
            ):
                expected = "lists of integers, a row for each sequence" if name in lists else "integers"
                raise ValueError(f"{self.path}: column {name!r} must hold {expected}, got {kind}: {hint}")

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return int(self.group_rows.sum())

    def select(self, columns: Sequence[str]) -> ParquetRows:
        """The dataset of some of its columns."""
        part = copy(self)
        part.schema = pa.schema([self.schema.field(name) for name in columns])
        part.columns = part.schema.names
        return part

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
            digest.update(f"{below_folder(self.root, file)}\n".encode())
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
        reader = RowReader(self, at_once=rows)
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
        with self._named(file), self.filesystem.open_input_file(file) as source:
            found = pq.ParquetFile(source)
            return found.schema_arrow.remove_metadata(), found.metadata

    @contextmanager
    def _named(self, file: str) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            raise ValueError(f"{self.path}: not a Parquet dataset: {file}: {error}") from error


def _values(about: pq.FileMetaData, columns: Sequence[str] | None) -> Iterator[tuple[Any, ...]]:
    """Of each column chunk its column, the number of values, the least and the greatest if that is told."""
    types = [about.schema.column(number).physical_type for number in range(about.num_columns)]
    for group in map(about.row_group, range(about.num_row_groups)):
        for type_, chunk in zip(types, map(group.column, range(about.num_columns)), strict=True):
            if chunk.physical_type != type_:  # of which pyarrow's `statistics` would end the process
                raise OSError(f"a column of {type_} has a row group of {chunk.physical_type}")
            name, told = chunk.path_in_schema, chunk.statistics
            if columns is None or name.partition(".")[0] in columns or name in columns:
                least = (told.min_raw, told.max_raw) if told is not None and told.has_min_max else ()
                yield name, chunk.num_values, *least


def _written(frame: Any) -> tuple[str, ScratchFolder]:
    """The path of a frame as Parquet, and its folder, which lives as long as that."""
    source, folder = Frame(frame), ScratchFolder()
    path, rows = f"{folder.name}/frame.parquet", 0
    with pq.ParquetWriter(
        path, pa.schema([source.schema.field(name) for name in source.names]), write_page_checksum=True
    ) as writer:
        for _part, table in source.tables(source.names):
            writer.write_table(table, row_group_size=FRAME_ROWS)
            rows += len(table)
    return path, folder


class RowReader:
    """Reads stretches of rows one after another, and goes on in a row group where the last one ended.

    Args:
        counts: of what is read, which readers may share.
        at_once: rows that are decoded at once, and wait until they are read.
        decoded: of row groups that other readers read as well.
    """

    def __init__(
        self,
        rows: ParquetRows,
        counts: ReadCounts | None = None,
        at_once: int = BATCH_ROWS,
        decoded: DecodedGroups | None = None,
    ) -> None:
        self.rows, self.counts, self._at_once = rows, counts or ReadCounts(), at_once
        self._decoded = decoded
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
        return self._plain(parts)

    def _plain(self, parts: list[pa.RecordBatch]) -> pa.Table:
        """The batches in the types of the dataset."""
        schema = self.rows.schema
        if all(part.schema.equals(schema) for part in parts):
            return pa.Table.from_batches(parts, schema)
        made = [
            pa.table([plain(part.column(field.name)).cast(field.type) for field in schema], schema)
            for part in parts
        ]
        return pa.concat_tables(made) if made else schema.empty_table()

    def close(self) -> None:
        """Close the file that is open."""
        if self._source is not None:
            self._source.close()
        self._group, self._source, self._batches, self._rest = -1, None, iter(()), None

    def _read(self, stretch: Stretch, file: str, number: int) -> Iterator[pa.RecordBatch]:
        if stretch.group != self._group or stretch.first < self._at:
            self.close()
            if self._decoded is None or not (found := self._decoded.at(stretch, self.counts)):
                found = 0, self._open(stretch.group, file, number)
            self._group, (self._at, self._batches) = stretch.group, found
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

    def _open(self, group: int, file: str, number: int) -> Iterator[pa.RecordBatch]:
        self._source = _CountedFile(self.rows.filesystem.open_input_file(file), self.counts)
        found = pq.ParquetFile(
            pa.PythonFile(self._source, mode="r"),
            metadata=self.rows.kept_footer(file),
            buffer_size=BUFFER_BYTES,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        self.rows.keep_footer(file, found.metadata)
        about = found.metadata.row_group(number)
        if about.num_rows != self.rows.file_rows[group]:
            raise OSError(f"it has {about.num_rows} rows, and had {self.rows.file_rows[group]} before")
        self.counts.rows += about.num_rows
        return found.iter_batches(
            self._at_once, row_groups=[number], columns=self.rows.columns, use_threads=False
        )


class DecodedGroups:
    """Row groups of which several readers read parts, decoded once into Arrow files of this process.

    Args:
        groups: those, by number.
        at_once: rows that are decoded, and later read, at once.
        most_bytes: that the files may have, and at most a quarter of what the disk has free. What is
            beyond is decoded by every reader, with a warning.

    Readers may be on several threads. The page cache has of the files what memory has room for.
    """

    def __init__(
        self,
        rows: ParquetRows,
        groups: Iterable[int],
        at_once: int = BATCH_ROWS,
        most_bytes: int = MOST_DECODED,
    ) -> None:
        self._rows, self._groups, self._at_once, self._left = rows, set(groups), at_once, most_bytes
        self._folder: ScratchFolder | None = None
        self._files: dict[int, tuple[Path, WriteBack]] = {}
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._rows, self._groups, self._at_once, self._left)

    def at(self, stretch: Stretch, counts: ReadCounts) -> tuple[int, Iterator[pa.RecordBatch]] | None:
        """A row at or before the stretch's first one, and the group's batches from that row on; None where
        the group is decoded by its reader. Raises the errors of `RowReader.read`.
        """
        with self._lock:
            if stretch.group in self._groups and stretch.group not in self._files:
                self._write(stretch.group, counts)
            written = self._files.get(stretch.group)
        if written is None:
            return None
        path, write_back = written
        # Not mapped: pages of a map count as memory of this process, by which a run of `--memory-limit` ends.
        found, number = pa.ipc.open_file(pa.OSFile(str(path))), stretch.first // self._at_once

        def batch(number: int) -> pa.RecordBatch:
            rows = found.get_batch(number)
            try:
                write_back.check()
            except OSError as error:
                raise OSError(
                    error.errno, f"{path}, where it was decoded, lost rows: {error.strerror}"
                ) from error
            return rows

        return number * self._at_once, map(batch, range(number, found.num_record_batches))

    def _write(self, group: int, counts: ReadCounts) -> None:
        (whole,), size = self._rows.stretches([group]), self._at_once
        reader, path = RowReader(self._rows, counts, size), None
        try:
            if self._folder is None:
                self._folder = _scratch_on_disk()
                # Other ranks write their own, and a disk that is full fails what others write there.
                self._left = min(self._left, shutil.disk_usage(self._folder.name).free // 4)
            path = Path(self._folder.name) / f"{group}.arrow"
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, self._rows.schema) as writer:
                for first in range(0, whole.last, size):
                    part = Stretch(group, first, min(first + size, whole.last))
                    writer.write_table(reader.read(part).combine_chunks())
                    if sink.tell() > self._left:
                        raise OSError(f"{self._left} bytes are left of those that they may have")
        except OSError as error:
            if path is not None:
                path.unlink(missing_ok=True)
            self._groups.clear()
            warnings.warn(
                f"{self._rows.path}: row groups of up to {self._rows.group_rows.max()} rows are decoded by "
                "each reader that has a part of them, as no more fit on the disk of temporary files "
                f"({error}): write the files with smaller row groups, or read with fewer readers",
                stacklevel=2,
            )
        else:
            self._left -= path.stat().st_size
            self._files[group] = path, WriteBack(pa.OSFile(str(path)))
        finally:
            reader.close()


def _scratch_on_disk() -> ScratchFolder:
    """A temporary folder, in the cache where temporary files are in memory; OSError where both are."""
    if not in_memory(tempfile.gettempdir()):
        return ScratchFolder()
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    if in_memory(str(cache)):
        raise OSError(f"{tempfile.gettempdir()} and {cache} are in memory")
    return ScratchFolder(folder=cache)


class _CountedFile:
    """A file for pyarrow, whose reads are counted and are slices of the trace."""

    def __init__(self, file: pa.NativeFile, counts: ReadCounts) -> None:
        self._file, self._counts = file, counts

    def read(self, size: int = -1) -> bytes:
        with work("read"):
            data = self._file.read(None if size < 0 else size)
        self._counts.bytes += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def schema_of(path: str) -> tuple[str, pa.Schema]:
    """A dataset's first file and its schema; raises the errors of `ParquetRows`."""
    place = files_at(path, "Parquet file")
    file = ParquetFile(place.filesystem, place.files[0])
    return file.path, file.schema
