"""Names, reads and flushes of a checkpoint's files."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..files.places import Place, RemotePath, kind_of, place_of

NUM_KEPT = 2
"""Checkpoints that a save leaves in a directory."""

PARTIAL = ".partial-"  # prefix of names that are still being written

_MANIFEST = re.compile(r"step-(\d{12})\.json")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is damaged; the message names the file."""


def folder_of(step: int) -> str:
    return f"step-{step:012d}"


def manifest_of(directory: Place, step: int) -> Place:
    return directory / f"{folder_of(step)}.json"


def steps(directory: Place | str) -> list[int]:
    """Steps that have a manifest in `directory`, ascending; none if there is no such directory."""
    place = place_of(directory)
    if not place.is_dir():
        return []
    matches = (_MANIFEST.fullmatch(name) for name in names_in(place))
    return sorted(int(match[1]) for match in matches if match)


def names_in(directory: Place) -> list[str]:
    return directory.names() if isinstance(directory, RemotePath) else os.listdir(directory)


def describe(error: BaseException) -> str:
    """An error and its type; the repr of a UnicodeDecodeError would include the whole text."""
    return f"{type(error).__name__}: {error}"


def size_of(path: Place) -> int:
    """Bytes of the regular file at `path`; OSError for anything else, whose read could block."""
    if isinstance(path, RemotePath):
        return path.size()
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"not a regular file, but {kind_of(status.st_mode)}", str(path))
    return status.st_size


@contextmanager
def reported(what: str, advice: str = "") -> Iterator[None]:
    """Any error inside as a CheckpointError, which says `what` before it and `advice` behind it."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {describe(error)}{advice}") from error


@contextmanager
def partial_of(directory: Place, name: str) -> Iterator[Path]:
    """Yield where a file is written before `publish`: beside its place, or here for one at a URL."""
    if isinstance(directory, RemotePath):
        with tempfile.TemporaryDirectory(prefix="tritonrec-") as folder:
            yield Path(folder, f"{PARTIAL}{name}")
    else:
        yield directory / f"{PARTIAL}{name}"


def publish(partial: Path, path: Place) -> None:
    """Flush `partial` to the disk and rename it to `path`, whose name is on the disk then, too."""
    if isinstance(path, RemotePath):
        path.upload(partial)
        return
    flush(partial)
    os.replace(partial, path)
    flush(path.parent)


def flush(path: Place) -> None:
    if isinstance(path, RemotePath):
        return  # a store keeps what was uploaded
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
