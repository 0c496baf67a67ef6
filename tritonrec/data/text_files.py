"""Text of logs: a local file or one at a URL, compressed or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow.fs as pafs

BLOCK_BYTES = 1 << 18
"""Of text that are parsed at once; a column takes as much meanwhile."""
PACKED = (".gz", ".bz2", ".zst", ".lz4")
"""Ends of the names of compressed files."""


@contextmanager
def opened(path: Path | str) -> Iterator[IO[str]]:
    """The text of one file, UTF-8, with its ends of lines; decompressed as it is read.

    Raises FileNotFoundError for a missing file, and ValueError for a folder, and naming a file that is not
    compressed as its name says.
    """
    name = str(path)
    if "://" not in name and not name.endswith(PACKED):
        if Path(name).expanduser().is_dir():
            raise ValueError(f"{name} is a folder: name one file")
        with Path(name).expanduser().open(encoding="utf-8-sig", newline="") as file:
            yield file
        return
    import pyarrow as pa  # which takes half a second

    filesystem, (place, *others) = text_files(name)
    if others:
        raise ValueError(f"{name} is several files: name one")
    with filesystem.open_input_stream(place, compression="detect") as stream:
        try:
            yield TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{name}: {error}") from error


def text_files(path: str) -> tuple[pafs.FileSystem, list[str]]:
    """The file system, and the files of a path (a file, a folder, a glob) in the order of their names.

    Raises the errors of `tritonrec.data.parquet_rows.filesystem_of`, FileNotFoundError for a path that does
    not exist, and ValueError where it holds no file.
    """
    from tritonrec.data.parquet_rows import filesystem_of, shards

    filesystem, place = filesystem_of(path)
    return filesystem, shards(filesystem, place, path, "file")[1]
