"""Names of a checkpoint's files, and how they are read, written and flushed."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from pathlib import Path

KEPT = 2

PARTIAL = ".partial-"  # prefix of names that are still being written

_MANIFEST = re.compile(r"step-(\d{12})\.json")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or cannot be trusted; the message names the file."""


def folder_of(step: int) -> str:
    return f"step-{step:012d}"


def manifest_of(directory: Path, step: int) -> Path:
    return directory / f"{folder_of(step)}.json"


def steps(directory: Path | str) -> list[int]:
    """Steps that have a manifest in `directory`, ascending; none if there is no such directory."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    matches = (_MANIFEST.fullmatch(name) for name in os.listdir(directory))
    return sorted(int(match[1]) for match in matches if match)


def in_words(error: BaseException) -> str:
    """The error and its kind; the repr of one about a byte that is no text holds the whole text."""
    return f"{type(error).__name__}: {error}"


def size_of(path: Path) -> int:
    """Bytes of the regular file at `path`; OSError for anything else, which reading could wait for."""
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status.st_size


def publish(partial: Path, path: Path) -> None:
    """Flush `partial` to the disk and give it its name; the name itself is flushed with the directory."""
    flush(partial)
    os.replace(partial, path)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
