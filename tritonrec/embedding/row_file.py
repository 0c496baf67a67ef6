"""Rows of one width in a file without a name, which is gone with the process, however that ends."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import time
import warnings
import weakref

import torch

from ..files import in_memory
from ..files.write_back import WriteBack
from . import numba_disk
from .row_storage import RowStorage

_PAGE, _MOST_AHEAD = 1 << 16, 1 << 28
SPOOLED = 1 << 26
"""Bytes of rows from which on a save copies them; the page cache holds fewer, and then each read is short."""
SLOW_SECONDS, SLOW_ROWS = 1.0, 1000
"""A disk is slow where rows take longer, and fewer move a second: an SSD moves ten times as many."""


class RowFile(RowStorage):
    """Row i, whose handle is i, is at byte ``i * row_bytes``. Lists are on the host, and without -1.

    The file is an anonymous one in the directory: no other process sees it, and the system frees its space
    when this one ends or is killed. What survives is the last checkpoint. A process that is forked from this
    one would share it, and write its rows over: there each use is an error.

    Args:
        path: an existing directory. row_bytes: of one row. dim: weights of a row, by default all values.
        of: what it has, for messages.

    Raises:
        OSError: it is missing or cannot be written, and at any later call, full or broken; the message says
            which, where, and what to do.
        RuntimeError: at any later call in a process that was forked from this one.
    """

    def __init__(self, path: str, row_bytes: int, dim: int | None = None, of: str = "rows"):
        self.path, self.row_bytes, self.nbytes, self._of = path, row_bytes, 0, of
        self.row_width, self.device = row_bytes // 4, torch.device("cpu")
        self.dim = self.row_width if dim is None else dim
        self.read_rows, self.written_rows, self._slow, self._process = 0, 0, False, os.getpid()
        try:
            self._file = tempfile.TemporaryFile(dir=path, buffering=0)  # noqa: SIM115
            # Nobody is to be told that it was open. At the end of the process a lane may still read it.
            weakref.finalize(self, self._file.close).atexit = False
            memory = in_memory(self._file.fileno())
        except OSError as error:
            raise self._named(error, "cannot be made") from error
        self._write_back = WriteBack(self._file)
        if memory:
            warnings.warn(
                f"tritonrec: {path!r} is in a file system in memory (tmpfs), so that the rows there take the "
                "memory that they are to save: name a directory on a disk",
                RuntimeWarning,
                stacklevel=2,
            )
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no row tells of the next one
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        self._move(False, nothing, nothing, nothing)  # compiled here: no disk is called slow for that

    def grow(self, end: int) -> None:
        """Reserve space for rows below `end`, so that a full disk shows before a row depends on it."""
        self._require_own()
        needed = -(-end * self.row_bytes // _PAGE) * _PAGE
        if needed > self.nbytes:
            size = max(needed, self.nbytes + min(self.nbytes, _MOST_AHEAD))
            try:
                os.posix_fallocate(self._file.fileno(), self.nbytes, size - self.nbytes)
            except OSError as error:
                raise self._named(error, f"cannot grow to {size:,} bytes") from error
            self.nbytes = size

    def add(self, handles: torch.Tensor, end: int) -> None:
        self.grow(end)

    def gather(self, handles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty(len(handles), self.row_width, dtype=torch.float32, device="cpu")
        self.read(handles, out, torch.arange(len(handles), dtype=torch.int64, device="cpu"))
        return out

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        self.write(handles, values, torch.arange(len(handles), dtype=torch.int64, device="cpu"))

    def memory(self) -> dict[str, int]:
        nothing = dict.fromkeys(("metadata", "fp32_values", "fp16_values", "saved_by_fp16"), 0)
        return {**nothing, "disk": self.nbytes}

    def spool(self, rows: int) -> RowFile | None:
        """A file beside this one for a copy of so many of its rows, which is read in its own order, and has
        the order in which a reader wants them. None where that gains nothing, or finds no space.
        """
        size = rows * self.row_bytes
        if size <= SPOOLED:
            return None
        file = RowFile(self.path, self.row_bytes)
        try:
            file.grow(rows)
        except OSError as error:
            file.close()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            warnings.warn(
                f"tritonrec: {self.path!r} has no space for a copy of {size:,} bytes of rows during a "
                "save: each is read by itself, which takes longer",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return file

    def close(self) -> None:
        """Give its space back at once."""
        self._file.close()

    def read(self, rows: torch.Tensor, memory: torch.Tensor, places: torch.Tensor) -> None:
        """``memory[places[i]]`` = row ``rows[i]``, both (K,) int64; `places` are distinct."""
        self._move(False, rows, memory, places)
        self.read_rows += len(rows)

    def write(self, rows: torch.Tensor, memory: torch.Tensor, places: torch.Tensor) -> None:
        """Row ``rows[i]`` = ``memory[places[i]]``, both (K,) int64; `rows` are distinct."""
        self._move(True, rows, memory, places)
        self.written_rows += len(rows)

    def _move(self, write: bool, rows: torch.Tensor, memory: torch.Tensor, places: torch.Tensor) -> None:
        self._require_own()
        assert memory.is_contiguous() and memory[:1].nbytes in (0, self.row_bytes)
        file, size, at, began = self._file.fileno(), self.row_bytes, 0, time.monotonic()
        arrays, address = (rows.numpy(), places.numpy()), memory.data_ptr()
        numba_disk.announce(file, arrays[0], size)
        while True:
            at = numba_disk.move(write, file, *arrays, address, size, at)
            if at == len(rows):
                break
            self._again(write, address + int(arrays[1][at]) * size, int(arrays[0][at]) * size)
            at += 1
        try:
            self._write_back.check()
        except OSError as error:
            raise self._named(error, "was not kept by the disk, rows are lost") from error
        seconds = time.monotonic() - began
        if len(rows) and seconds > max(SLOW_SECONDS, len(rows) / SLOW_ROWS) and not self._slow:
            self._slow = True  # said once
            what = "rows" if self._of == "rows" else f"groups of {self._of}"
            warnings.warn(
                f"tritonrec: the disk of {self.path!r} is slow, or busy: {len(rows):,} {what} of a table "
                f"took {seconds:.1f} s to be {'written' if write else 'read'}, and training waits for them; "
                "raise the memory of tables on disk (disk_memory), or name another disk",
                RuntimeWarning,
                stacklevel=2,
            )

    def _require_own(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"a table's file of {self._of} in {self.path!r} is that of process {self._process}, from "
                "which this one was forked, and both would write it: make the table here, or load its "
                "checkpoint"
            )

    def _again(self, write: bool, address: int, offset: int) -> None:
        """Copy one row, by a call that says why it cannot be, or that nothing but a signal was the reason."""
        row, done = memoryview((ctypes.c_char * self.row_bytes).from_address(address)).cast("B"), 0
        while done < self.row_bytes:
            try:
                call = os.pwritev if write else os.preadv
                moved = call(self._file.fileno(), [row[done:]], offset + done)
                if not moved:
                    raise OSError(errno.EIO, "the file ends before it")
            except OSError as error:
                verb = "written" if write else "read"
                raise self._named(error, f"has a row at byte {offset:,} that cannot be {verb}") from error
            done += moved

    def _named(self, error: OSError, what: str) -> OSError:
        advice = {
            errno.ENOSPC: "free space there or name a larger disk",
            errno.EDQUOT: "raise the quota there or name another disk",
            errno.ENOENT: "make the directory first",
            errno.ENOTDIR: "name a directory",
            errno.EACCES: "name a directory that this user may write to",
            errno.EMFILE: "raise the limit of open files (ulimit -n)",
            errno.EFBIG: "raise the limit of a file's size (ulimit -f), or use more ranks",
            errno.EROFS: "name a directory on a disk that can be written",
        }.get(error.errno or 0, "check that disk")
        return OSError(
            error.errno,
            f"a table's file of {self._of} in {self.path!r} {what}: {error.strerror}; {advice}"
            + (", and go on from the last checkpoint" if self.nbytes else ""),
        )
