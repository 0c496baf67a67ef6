"""Any source of rows as tables: files of text, JSON, Parquet and Arrow, and frames of other libraries.

A source has files (a frame is one), and a file has `names` of its columns and `tables` of some of them, each
with the `Part` that its errors name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
from torch import Tensor

from tritonrec.data.log_files import PACKED, LogFiles, files_at
from tritonrec.data.log_format import LogFormat
from tritonrec.data.presets import Preset
from tritonrec.data.text_tables import UNREADABLE, CsvFile, JsonFile
from tritonrec.data.values import Part, common_type

if TYPE_CHECKING:
    import pyarrow.fs as pafs

KINDS = ("csv", "json", "parquet", "arrow")
"""Of files."""
SUFFIXES = {
    ".parquet": "parquet", ".pq": "parquet", ".json": "json", ".jsonl": "json", ".ndjson": "json",
    ".arrow": "arrow", ".arrows": "arrow", ".feather": "arrow", ".ipc": "arrow", ".csv": "csv", ".tsv": "csv",
    ".txt": "csv", ".dat": "csv", ".data": "csv", ".inter": "csv",
}  # fmt: skip
OTHERS = {".orc": "ORC", ".avro": "Avro", ".xlsx": "Excel", ".xls": "Excel"}
"""Kinds of tables that are not read, by their ends: one beside others would be missing in silence."""
TABLE_ROWS = 1 << 17
"""Rows of a part of a Parquet file, at most."""
_METADATA = re.compile(r"__index_level_\d+__|__null_dask_index__")
"""Columns of the writer, not of the data."""


class File(Protocol):
    """A file of rows, or a frame in memory."""

    path: str

    @property
    def names(self) -> list[str]: ...

    def booleans(self) -> list[str]: ...

    def tables(self, columns: Sequence[str]) -> Iterator[tuple[Part, pa.Table]]: ...


def kind_of(path: str) -> str | None:
    """The kind of a file by the end of its name; None for any other."""
    for end in PACKED:
        path = path.removesuffix(end)
    return SUFFIXES.get(Path(path).suffix.lower())


def is_metadata(name: str) -> bool:
    """Whether a column belongs to the writer of a table."""
    return _METADATA.fullmatch(name) is not None


def open_files(place: LogFiles, kind: str, format: LogFormat) -> list[File]:
    """The files of a place; of a kind of `KINDS`, or by the ends of their names.

    Without a kind files of other names are left out, where some have known ones; so are empty files of text.
    """
    for file in place.files:
        if not kind and (other := OTHERS.get(Path(file).suffix.lower())):
            raise ValueError(
                f"{file}: files of {other} are not read: load the table that pyarrow or pandas makes of it, "
                "or write it as Parquet"
            )
    kinds = [kind or kind_of(file) for file in place.files]
    known = [(file, each) for file, each in zip(place.files, kinds, strict=True) if each]
    chosen = known or [(file, "csv") for file in place.files]
    if len(chosen) > 1:  # writers leave empty shards of text
        sizes = {about.path: about.size for about in place.filesystem.get_file_info(place.files)}
        chosen = [(f, each) for f, each in chosen if sizes[f] != 0 or each not in ("csv", "json")] or chosen
    opened: list[File] = []
    for file, each in chosen:
        if each in ("csv", "json"):
            opened.append((CsvFile if each == "csv" else JsonFile)(place.filesystem, file, format))
        else:
            opened.append((ParquetFile if each == "parquet" else ArrowFile)(place.filesystem, file))
    return opened


def tables_of(file: File, columns: Sequence[str], kinds: Sequence[int]) -> Iterator[tuple[Part, pa.Table]]:
    """The columns of a file; those of text may be numbers of `kinds` (`CsvFile.tables`)."""
    return file.tables(columns, kinds) if isinstance(file, CsvFile) else file.tables(columns)


class _Typed:
    """Columns with types."""

    path: str
    schema: pa.Schema

    @property
    def names(self) -> list[str]:
        """Of the columns, without those of the writer."""
        return [name for name in self.schema.names if not is_metadata(name)]

    def booleans(self) -> list[str]:
        """Names of the columns of booleans."""
        return [each.name for each in self.schema
                if pa.types.is_boolean(each.type) and not is_metadata(each.name)]  # fmt: skip


class ParquetFile(_Typed):
    """A file of Parquet."""

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        self.filesystem, self.path = filesystem, path

    @cached_property
    def footer(self) -> tuple[pa.Schema, pq.FileMetaData]:
        """Schema and metadata; raises ValueError for a file that is no Parquet."""
        try:
            with self.filesystem.open_input_file(self.path) as source:
                found = pq.ParquetFile(source)
                return found.schema_arrow, found.metadata
        except UNREADABLE as error:
            raise ValueError(f"{self.path}: not a Parquet file: {error}") from error

    @property
    def schema(self) -> pa.Schema:
        """Of all columns."""
        return self.footer[0]

    def tables(self, columns: Sequence[str]) -> Iterator[tuple[Part, pa.Table]]:
        """The columns, never of two row groups; raises ValueError naming the row group that is damaged."""
        about, first = self.footer[1], 0
        for number in range(about.num_row_groups):
            if not (rows := about.row_group(number).num_rows):
                continue
            read = 0
            try:
                with self.filesystem.open_input_file(self.path) as source:
                    found = pq.ParquetFile(source, metadata=about, page_checksum_verification=True)
                    batches = found.iter_batches(
                        TABLE_ROWS, row_groups=[number], columns=list(columns), use_threads=False
                    )
                    for batch in batches:
                        yield Part(self.path, "row", first + read), _known(self.path, batch)
                        read += len(batch)
            except UNREADABLE as error:
                raise ValueError(f"{self.path}: row group {number} cannot be read: {error}") from error
            first += rows


class ArrowFile(_Typed):
    """A file of Arrow's own format (Feather), or of its stream format."""

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        self.filesystem, self.path = filesystem, path

    @cached_property
    def schema(self) -> pa.Schema:
        """Of all columns."""
        return next(iter(self._batches(True)))

    def _batches(self, only_schema: bool = False) -> Iterator[Any]:
        try:
            with self.filesystem.open_input_file(self.path) as source:
                try:
                    reader = ipc.open_file(source)
                    every = (reader.get_batch(number) for number in range(reader.num_record_batches))
                except pa.ArrowInvalid:
                    source.seek(0)
                    reader = every = ipc.open_stream(source)
                yield from [reader.schema] if only_schema else every
        except UNREADABLE as error:
            raise ValueError(f"{self.path}: not a file of Arrow: {error}") from error

    def tables(self, columns: Sequence[str]) -> Iterator[tuple[Part, pa.Table]]:
        """The columns, batch by batch."""
        yield from _numbered(self.path, self._batches(), columns)


class Frame(_Typed):
    """Rows of another library: whatever has Arrow's C stream, or leads to one by `TOWARDS`."""

    path = "the table"

    def __init__(self, source: Any) -> None:
        given = type(source).__name__
        try:
            if hasattr(source, "with_format"):
                source = _of_hugging_face(source)
            columns = source if isinstance(source, dict) or hasattr(source, "iloc") else {}
            if isinstance(source, dict):
                source = pa.table({name: _array(own) for name, own in source.items()})
            if isinstance(source, pa.RecordBatch):
                source = pa.Table.from_batches([source])
            while not hasattr(source, "__arrow_c_stream__"):
                if not (ways := [name for name in TOWARDS if hasattr(source, name)]):
                    means = "with Arrow's C stream, as of pyarrow, pandas or Polars, or arrays by name"
                    raise ValueError(f"expected a path or a table ({means}), got {given}")
                source = getattr(source, ways[0])()
            self._reader = pa.RecordBatchReader.from_stream(source)
        except (pa.ArrowException, TypeError, OverflowError) as error:  # what Arrow has no type for
            raise ValueError(f"the table cannot be read as Arrow: {error}") from error
        self.schema = self._reader.schema
        for each in self.schema:
            if pa.types.is_timestamp(each.type) and _mixes_zones(columns.get(each.name)):
                raise ValueError(
                    f"{self.path}: column {each.name!r} has times with a zone and times without one, which "
                    "Arrow takes for times of UTC: write them alike"
                )

    def tables(self, columns: Sequence[str]) -> Iterator[tuple[Part, pa.Table]]:
        """The columns, batch by batch; a reader can be read once. ValueError where a query fails then."""
        try:
            yield from _numbered(self.path, self._reader, columns)
        except UNREADABLE as error:
            raise ValueError(f"the table cannot be read: {error}") from error


TOWARDS = ("scanner", "scan", "collect", "to_pyarrow_dataset", "to_arrow_batch_reader", "to_reader")
"""Methods towards a stream, of a dataset of pyarrow or Lance, Iceberg, a lazy frame, Delta, scans."""


def is_frame(source: Any) -> bool:
    """Whether `source` is rows of another library, or arrays by name."""
    names = ("__arrow_c_stream__", "with_format", *TOWARDS)
    return isinstance(source, (dict, pa.RecordBatch)) or any(hasattr(source, name) for name in names)


def _array(values: Any) -> Any:
    """A column of a dictionary; tensors as arrays."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _mixes_zones(values: Any) -> bool:
    """Whether objects of Python are times with a zone and times without; NaT, unequal to itself, is none."""
    if not isinstance(values, (list, tuple)) and str(getattr(values, "dtype", "")) != "object":
        return False
    return len({each.tzinfo is None for each in values if isinstance(each, datetime) and each == each}) > 1


def _of_hugging_face(source: Any) -> pa.RecordBatchReader:
    """A dataset's rows, selected and shuffled as it has them, which those of its table are not."""
    if isinstance(source, dict):
        raise ValueError(f"the datasets {', '.join(source)} are a log each: take one of them")
    tables = source.with_format("arrow").iter(TABLE_ROWS)
    if source.features is None:  # an iterable's, found by its first rows
        tables = chain([first := next(tables, pa.table({}))], tables)
    schema = first.schema if source.features is None else source.features.arrow_schema
    return pa.RecordBatchReader.from_batches(
        schema, (batch for table in tables for batch in table.to_batches())
    )


class Log:
    """A log at a path or in memory.

    Args:
        source: a path (a file, a folder, a glob, a URL), or a frame.
        format: of the log. kind: of the files; by default by the ends of their names.
        preset: whose settings the format has, with the names of its files.
        words: for ``ids="words"`` a vocabulary for each column of words; one that is missing is added.

    Attributes:
        name: for errors. place: of the files, None for a frame.

    Raises FileNotFoundError for a path that does not exist, and ValueError where it holds no file.
    """

    def __init__(
        self,
        source: Any,
        format: LogFormat = LogFormat(),  # noqa: B008
        kind: str = "",
        preset: Preset | None = None,
        words: dict[str, Any] | None = None,
    ) -> None:
        self.format, self.preset, self._kind = format, preset, kind
        self.place: LogFiles | None = None
        self._frame = None if isinstance(source, (str, Path)) else Frame(source)
        self.name = self._frame.path if self._frame else str(source)
        if self._frame is None:
            title = "Parquet file" if kind == "parquet" else "file"
            self.place = files_at(self.name, title, patterns=preset.files.split() if preset else ())
            if preset:
                preset.check_files(self.place.files)
        self.words: dict[str, Any] = {} if words is None else words

    @cached_property
    def opened(self) -> list[File]:
        """The files of the log itself."""
        if self._frame is not None:
            return [self._frame]
        assert self.place is not None
        return open_files(self.place, self._kind, self.format)


def common_schema(
    paths: list[str], schemas: list[pa.Schema], columns: Iterable[str] | None = None
) -> pa.Schema:
    """The plain types that columns have in all files, those of the first file by default.

    Raises ValueError naming the file that lacks a column, has it twice, or one of another kind.
    """
    names = [name for name in schemas[0].names if not is_metadata(name)] if columns is None else list(columns)
    found = []
    for name in names:
        kinds = []
        for path, schema in zip(paths, schemas, strict=True):
            if name not in schema.names:
                raise ValueError(f"{path}: no column {name!r}; found {', '.join(schema.names)}")
            if schema.names.count(name) > 1:
                raise ValueError(f"{path}: two columns are named {name!r}")
            kinds.append(schema.field(name).type)
        shared = common_type(kinds)
        if shared is None:
            kind = next(kind for kind in kinds if common_type([kinds[0], kind]) is None)
            raise ValueError(
                f"{paths[kinds.index(kind)]}: column {name!r} is {kind}, but {kinds[0]} in {paths[0]}"
            )
        found.append((name, shared))
    return pa.schema(found)


def _numbered(path: str, batches: Any, columns: Sequence[str]) -> Iterator[tuple[Part, pa.Table]]:
    first = 0
    for batch in batches:
        if len(batch):
            yield Part(path, "row", first), _known(path, batch.select(list(columns)))
        first += len(batch)


def _known(path: str, batch: pa.RecordBatch) -> pa.Table:
    """As a table; ValueError for a type that its writer made: the numbers of pandas' periods tell nothing."""
    for each in batch.schema:
        own = getattr(each.type, "extension_name", None)  # where the package that made it is imported
        own = own or (each.metadata or {}).get(b"ARROW:extension:name", b"").decode()
        if own and not own.startswith("arrow."):
            raise ValueError(
                f"{path}: column {each.name!r} is of the type {own} of its writer: cast the column"
            )
    return pa.Table.from_batches([batch])
