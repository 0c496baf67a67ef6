"""Where the files of a log are: a file, a folder of files at any depth, or a glob, local or at a URL.

Files are in the natural order of their paths (``day_2`` before ``day_10``). Names that begin with ``_`` or
``.`` are left out, and so are files in such folders. In a glob ``**`` is any number of folders, and a folder
that it matches is all its files. What exists is that file or folder, also where its name has a wildcard in it
(``a[1].tsv``, ``logs[1]/*.csv``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritonrec.files import natural_order
from tritonrec.files.places import NamedErrors, filesystem_at, place_of

if TYPE_CHECKING:
    import pyarrow.fs as pafs

PACKED = (".gz", ".bz2", ".zst", ".lz4")
"""Ends of the names of compressed files."""
NO_FILE = "no file, but a link to nothing, a pipe, a device or a folder"


@dataclass(frozen=True)
class LogFiles:
    """Files of a log.

    Attributes:
        path: as the user wrote it. root: the folder below which they are. files: paths in the file system.
        is_folder: whether `path` is that folder, and no file or glob.
    """

    path: str
    filesystem: pafs.FileSystem
    root: str
    files: list[str]
    is_folder: bool = False


def files_at(path: str, kind: str = "file", filesystem: Any = None, patterns: Sequence[str] = ()) -> LogFiles:
    """The files of a path.

    Args:
        kind: what they are called in errors.
        patterns: of the names that a folder's files have, the first one that some have, also compressed.

    Raises FileNotFoundError for a path that does not exist and a folder without files of such names, and
    ValueError where it holds no file at all.
    """
    import pyarrow as pa
    from pyarrow.fs import FileSelector, FileType, LocalFileSystem

    fs, place = filesystem_of(path, filesystem)
    try:
        if fs.get_file_info(place or "/").type == FileType.File:
            return LogFiles(path, fs, place.rpartition("/")[0], [place])
        base, wild = without_wildcards(place)
        while wild and fs.get_file_info(longer := f"{base}/{wild[0]}").type != FileType.NotFound:
            more, wild = without_wildcards("/".join(wild[1:]))
            base = "/".join([longer, *filter(None, [more])])
        about = fs.get_file_info(base or "/")
        if about.type == FileType.NotFound:
            raise FileNotFoundError(f"{path}: no such file or folder")
        if about.type == FileType.File and not wild:
            return LogFiles(path, fs, base.rpartition("/")[0], [base])
        if about.type == FileType.Unknown:  # a pipe, a socket, a device
            raise ValueError(f"{path}: neither a file nor a folder: write what it holds into a file")
        found = fs.get_file_info(FileSelector(base or "/", recursive=True))
    except pa.ArrowException as error:
        raise ValueError(f"{path}: {error}") from error
    except OSError as error:  # a store's own, which names no place
        if str(path) in str(error):
            raise
        raise OSError(f"{path}: {error}") from error

    def is_due(file: str) -> bool:
        below = below_folder(base, file).split("/")
        if any(part[:1] in ("_", ".") for part in below) or not _matches(below, wild):
            return False
        return bool(wild) or not patterns or any(_is(file, each) for each in patterns)

    files = [info.path for info in found if info.type == FileType.File and is_due(info.path)]
    ends = {os.path.splitext(file)[1] for file in files} - {""}
    for folder, folders, names in os.walk(base or "/") if isinstance(fs, LocalFileSystem) else ():
        if not folders and not names and os.path.splitext(folder)[1] in ends and is_due(folder):
            raise ValueError(f"{folder}: an empty folder with the name of a file")
        for path_there in (os.path.join(folder, name) for name in names):
            if is_due(path_there) and os.path.lexists(path_there) and not os.path.isfile(path_there):
                # a part would be missing in silence
                raise ValueError(f"{path_there}: {NO_FILE}")
    if patterns and not wild:
        files = next(filter(None, ([file for file in files if _is(file, each)] for each in patterns)), [])
        if not files:
            raise FileNotFoundError(f"{path}: the folder holds no {' or '.join(patterns)}")
        folders = sorted({file.rpartition("/")[0] for file in files})
        if len(folders) > 1:
            raise ValueError(f"{path}: several folders have such files: name one of {', '.join(folders)}")
    if not files:
        raise ValueError(f"{path}: the dataset holds no {kind}")
    _check_once(files, isinstance(fs, LocalFileSystem))
    return LogFiles(path, fs, base, sorted(files, key=natural_order), not wild)


def is_there(filesystem: pafs.FileSystem, file: str) -> bool:
    """Whether a file is there; ValueError where what has its name is none, but a folder, a pipe or a link to
    nothing.
    """
    from pyarrow.fs import FileType, LocalFileSystem

    found = filesystem.get_file_info(file).type
    link = isinstance(filesystem, LocalFileSystem) and os.path.lexists(file)
    if found != FileType.File and (found != FileType.NotFound or link):
        raise ValueError(f"{file}: {NO_FILE}")
    return found == FileType.File


def _check_once(files: Sequence[str], is_local: bool) -> None:
    """Raise ValueError for a file that is there twice: by a link, also of a folder to itself, or packed."""
    known: dict[str | tuple[int, int], str] = {}
    for file in files:
        about = os.stat(file) if is_local else None
        packed = next((end for end in PACKED if file.endswith(end)), "")
        for key in (file.removesuffix(packed), about and (about.st_dev, about.st_ino)):
            if key and known.setdefault(key, file) != file:
                raise ValueError(f"{known[key]} and {file} hold the same events: name one of them")


def _matches(below: list[str], wild: list[str]) -> bool:
    """Whether a glob matches a file, or a folder that it is in, by the parts of both paths."""
    if not wild:
        return True
    if wild[0] == "**":
        return any(_matches(below[at:], wild[1:]) for at in range(len(below)))
    return bool(below) and fnmatchcase(below[0], wild[0]) and _matches(below[1:], wild[1:])


def _is(file: str, pattern: str) -> bool:
    name = file.rpartition("/")[2]
    return any(fnmatchcase(name, pattern + end) for end in ("", *PACKED))


def filesystem_of(path: str | Path, filesystem: Any = None) -> tuple[pafs.FileSystem, str]:
    """The file system of a path, and the path there.

    pyarrow's own where it has one for the URL, else fsspec's. Raises ValueError for an unknown protocol.
    """
    import pyarrow.fs as pafs

    if filesystem is not None:
        is_arrow = isinstance(filesystem, pafs.FileSystem)
        return (
            filesystem if is_arrow else pafs.PyFileSystem(pafs.FSSpecHandler(NamedErrors(filesystem)))
        ), str(path)
    local = place_of(path)
    if isinstance(local, Path):
        # A glob in the working directory has no folder before it, and a colon would be that of a URL.
        is_bare = not set(str(local).partition("/")[0]).isdisjoint("*?[:")
        return pafs.LocalFileSystem(), str(local.absolute() if is_bare else local)
    # The store's settings (``?endpoint_override=...``) are no wildcard.
    url, query = re.fullmatch(r"(.*?)(\?\w+=[^?]*)?", str(local), re.DOTALL).groups("")  # type: ignore[union-attr]
    base, wild = without_wildcards(url)
    found, place = filesystem_at(base + query)
    if not isinstance(found, pafs.FileSystem):
        found = pafs.PyFileSystem(pafs.FSSpecHandler(NamedErrors(found)))
    return found, "/".join([place.rstrip("/"), *wild])


def without_wildcards(path: str) -> tuple[str, list[str]]:
    """The folders before the first part with a wildcard, and the parts from there on."""
    parts = path.split("/")
    wild = next((place for place, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    return "/".join(parts[:wild]), parts[wild:]


def below_folder(folder: str, file: str) -> str:
    """The path of a file from its folder on; some file systems add a slash in front."""
    return file.strip("/").removeprefix(folder.strip("/")).strip("/")
