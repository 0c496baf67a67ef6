"""Atomic writes, and temporary folders that are removed with their process."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .places import Place, RemotePath, place_of, staged


def natural_order(path: str | os.PathLike[str]) -> tuple[Any, ...]:
    """The key that sorts paths with their numbers as numbers: ``day_2`` before ``day_10``."""
    name = os.fspath(path)
    # Digits stand at odd places of a split; folder by folder, so that "/" sorts before every other character.
    folders = [re.split("([0-9]+)", part) for part in name.split("/")]
    return [[int(part) if at % 2 else part for at, part in enumerate(parts)] for parts in folders], name


@contextmanager
def atomic_write(path: str | os.PathLike[str] | RemotePath) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`, which is renamed to `path` at the end.

    The folder is created if needed. After an error the old file is unchanged; of several writers the last one
    wins. Links still lead to their target, permissions stay, and other hard links keep the old content. A
    path that is not a regular file, such as a pipe, and the file of this process's output (``/dev/stdout >
    file``) are written directly; a file at a URL is uploaded at the end. Nothing is flushed to the disk: safe
    against the end of the process, not of the power.
    """
    target = place_of(path)
    if isinstance(target, RemotePath):
        with staged(target, target.name) as local:
            yield local
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and (not target.is_file() or _is_output(target)):
        yield target
        return
    target = target.resolve()
    part = target.with_name(f".{target.name[:50]}-{secrets.token_hex(8)}.part")
    try:
        with full_disk_named(target):
            yield part
            if target.exists():
                shutil.copymode(target, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def full_disk_named(path: Place) -> Iterator[None]:
    """Inside, an error of a full disk names `path`: those of writes say of which file they are nowhere."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT) or error.filename:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def _is_output(path: Path) -> bool:
    """Whether standard output or standard error is redirected to `path`."""
    for stream in (1, 2):
        try:
            if os.path.samestat(os.fstat(stream), path.stat()):
                return True
        except OSError:  # a closed stream
            continue
    return False


def save_json(document: Any, path: str | os.PathLike[str] | RemotePath) -> None:
    """Write `document` as indented JSON, atomically."""
    text = json.dumps(document, indent=2) + "\n"
    with atomic_write(path) as part:
        part.write_text(text)


def check_writable(path: str | os.PathLike[str] | RemotePath, folder: bool = False) -> None:
    """Raise OSError naming `path`, if no file can be written there, or into the `folder` there.

    Creates and changes nothing.
    """
    target = place_of(path)
    if isinstance(target, RemotePath):
        target.require_writable()
        if target.is_dir() and not folder:  # which reaches the store
            raise _cannot_write(target, IsADirectoryError(errno.EISDIR, "it is a folder"))
        return
    try:
        target.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:  # also a name that is too long
        raise _cannot_write(target, error) from error
    if target.is_dir() != folder and target.exists():
        wrong = NotADirectoryError(errno.ENOTDIR, "it is no folder")
        raise _cannot_write(target, wrong if folder else IsADirectoryError(errno.EISDIR, "it is a folder"))
    if not folder and target.exists() and (not target.is_file() or _is_output(target)):
        if not os.access(target, os.W_OK):
            raise _cannot_write(target, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        return
    place = target.resolve() if folder else target.resolve().parent
    try:
        while not place.exists():
            place = place.parent
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise _cannot_write(target, error) from error


def _cannot_write(path: Place, error: OSError) -> OSError:
    return type(error)(error.errno, f"cannot write {path}: {error.strerror}")


class ScratchFolder(tempfile.TemporaryDirectory):
    """A temporary folder that is removed with this process, also when the process is killed.

    A small process in its own session reads from a pipe, which closes when this process ends by any signal,
    and then removes the folder. Use it like `tempfile.TemporaryDirectory`: one that nobody refers to is
    cleaned up.
    """

    def __init__(self, prefix: str = "tritonrec-", folder: str | os.PathLike[str] | None = None):
        super().__init__(prefix=prefix, dir=folder)
        self._remover = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REMOVE, self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._end_remover = weakref.finalize(self, self._remover.communicate)
        self._end_remover.atexit = False  # it ends with this process by itself

    def cleanup(self) -> None:
        """Remove the folder now."""
        super().cleanup()
        self._end_remover()


def in_memory(file: int | str, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether the file system of a path or open file is in memory; False where the kernel does not tell."""
    device = os.stat(file).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = mounts.read_text().splitlines() if mounts.exists() else []
    kinds = (line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == number)
    return any(kind in ("tmpfs", "ramfs") for kind in kinds)


# Ranks may still write there until they notice the end of their launcher, so removal is repeated for 10 s.
_REMOVE = """
import os, shutil, sys, time
sys.stdin.buffer.read()
for _ in range(100):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""
