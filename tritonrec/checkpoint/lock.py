"""One writer at a time: rank 0 of a run locks the directory for as long as the run saves there."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import warnings
from contextlib import suppress
from pathlib import Path
from typing import IO

from .files import CheckpointError

NAME = ".lock"

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class WriterLock:
    """A lock (flock) of the file ``.lock`` in `directory`, which says who holds it.

    The system gives the lock up when the process ends, however it ends; a file that a killed process left
    behind is taken over. `release` removes the file.
    """

    def __init__(self, directory: Path | str):
        self.path = Path(directory) / NAME
        self._file: IO[str] | None = None

    def hold(self) -> None:
        """Take the lock; nothing happens where this object has it already. Makes the directory.

        Raises CheckpointError naming the process that has the lock, and OSError where no file can be made.
        A file system without locks is a warning.
        """
        if self._file is not None and self._in_place(self._file):
            return
        self.release()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.fdopen(os.open(self.path, flags, 0o666), "r+", errors="replace")
            try:
                self._lock(file)
            except BaseException:
                file.close()
                raise
            if self._in_place(file):
                break
            file.close()  # who had it has removed it: it keeps nobody out
        with suppress(OSError):  # a full disk; the lock holds without the words
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        self._file = file

    def release(self) -> None:
        """Give the lock up and remove its file; nothing happens where it is not held."""
        file, self._file = self._file, None
        if file is None:
            return
        with suppress(OSError):
            if self._in_place(file):
                self.path.unlink()
        with suppress(OSError):
            file.close()

    def _lock(self, file: IO[str]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = file.read(200) or "another process"
            raise CheckpointError(
                f"{self.path.parent} is in use: {holder} saves checkpoints there. One run saves into a "
                "directory at a time: end that process, or choose another directory"
            ) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            warnings.warn(
                f"{self.path.parent}: its file system has no locks ({error}), so nothing keeps a second run "
                "from saving there",
                RuntimeWarning,
                stacklevel=2,
            )

    def _in_place(self, file: IO[str]) -> bool:
        """Whether the file that is open is the one at the path, and not one that was removed meanwhile."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False
