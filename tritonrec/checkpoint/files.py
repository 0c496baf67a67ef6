"""Names, reads and flushes of a checkpoint's files."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from pathlib import Path

NUM_KEPT = 2
"""Checkpoints that a save leaves in a directory."""

PARTIAL = ".partial-"  # prefix of names that are still being written

_MANIFEST = re.compile(r"step-(\d{12})\.json")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is damaged; the message names the file."""


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


def describe(error: BaseException) -> str:
    """An error and its type; the repr of a UnicodeDecodeError would include the whole text."""
    return f"{type(error).__name__}: {error}"


def size_of(path: Path) -> int:
    """Bytes of the regular file at `path`; OSError for anything else, whose read could block."""
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status.st_size


def publish(partial: Path, path: Path) -> None:
    """Flush `partial` to the disk and rename it to `path`; flush the directory for the name itself."""
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
