"""One writer at a time: rank 0 of a run locks the directory as long as the run saves there."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import warnings
from contextlib import suppress
from typing import IO

from ..files.places import Place, RemotePath, place_of
from .files import CheckpointError

NAME = ".lock"

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class WriterLock:
    """A lock (flock) of the file ``.lock`` in `directory`, which names the process that holds it.

    The system releases the lock when the process ends, for any reason; the file of a killed process is
    reused. `release` removes the file.
    """

    def __init__(self, directory: Place | str):
        self.path = place_of(directory) / NAME
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Take the lock, if this object does not hold it yet; creates the directory.

        Raises CheckpointError naming the process that holds the lock, and OSError where no file can be
        created. Warns on a file system without locks.
        """
        if isinstance(self.path, RemotePath):
            self.path.require_writable()
            self._warn("a store at a URL")
            return
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
            file.close()  # its last holder has removed it, so it excludes nobody
        with suppress(OSError):  # a full disk; the lock works without the text
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        self._file = file

    def release(self) -> None:
        """Release the lock and remove its file, if this object holds it."""
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
            self._warn(str(error))

    def _warn(self, reason: str) -> None:
        warnings.warn(
            f"{self.path.parent}: its file system has no locks ({reason}), so nothing keeps a second run "
            "from saving there",
            RuntimeWarning,
            stacklevel=3,
        )

    def _in_place(self, file: IO[str]) -> bool:
        """Whether the open file is still the one at the path."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(str(self.path)))
        except (FileNotFoundError, NotADirectoryError):
            return False
