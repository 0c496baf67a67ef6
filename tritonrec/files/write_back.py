"""Whether the disk has kept what was written to a file that is read again, without waiting for it."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

# Linux alone. The offset is behind all files: no page is there to be waited for or written, and what is left
# of the call is the look at errors of this file's pages, 1 to 3 microseconds.
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_NOWHERE, _WAIT_BEFORE = 1 << 62, 1
_NOT_TOLD = {errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EBADF, errno.ESPIPE, errno.EOPNOTSUPP}


def write_back_error(file: int) -> int:
    """The errno with which pages of an open file did not reach its disk since the last such call; 0.

    A write returns once its bytes are in the page cache. Where the disk then fails, or has less space than
    its file system believes (thin volumes), the kernel forgets the pages, and a later read has what was there
    before, without an error. It keeps the error for those who ask. An overlay file system (a container's
    own root) does not tell.
    """
    if _sync_file_range is None or not _sync_file_range(file, _NOWHERE, 1, _WAIT_BEFORE):
        return 0
    error = ctypes.get_errno()
    return 0 if error in _NOT_TOLD else error


class WriteBack:
    """The `write_back_error` of an open file, which stays: no thread is to trust what it reads later.

    Args:
        file: has `fileno`, and stays open: the kernel may forget what it knows of a file nobody has open.
    """

    def __init__(self, file: Any):
        self._file, self._error = file, 0

    def check(self) -> None:
        """Call it after a read, before its bytes are used. Raises OSError."""
        self._error = self._error or write_back_error(self._file.fileno())
        if self._error:
            raise OSError(self._error, f"{os.strerror(self._error)} when the system wrote it to the disk")
