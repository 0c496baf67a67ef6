"""Loggers: where the numbers of a training go. Rank 0 alone logs."""

from __future__ import annotations

import csv
import json
import math
import operator
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from .files import atomic_write, full_disk_named
from .files.places import Place, RemotePath, kind_of, place_of
from .optional import require
from .settings import no_copy, typed

__all__ = ["CSVLogger", "JSONLinesLogger", "Logger", "TensorBoardLogger"]

_NO_COPY = no_copy("it has an open file; make it in the process that logs")


class Logger(Protocol):
    """What a training loop calls."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values after `step` steps, by name; a step may be logged again with other names."""

    def close(self) -> None:
        """Write what is not written yet; nothing is logged afterwards."""


@typed
class CSVLogger(Logger):
    """A table with a row for each call of `log`, as `pandas.read_csv` takes it: `step`, and a column by name.

    Each row is written at once. A name that is new rewrites the file with one more column.

    Args:
        path: of the file, whose folder is made; or a URL, where the file is written anew every half minute.
        purge_step: go on with the file, without what was logged at this step or later; None: a new file.

    Raises FileExistsError for a file that is there where `purge_step` is None, ValueError for one that is no
    such table.
    """

    __reduce_ex__ = _NO_COPY

    def __init__(self, path: str | os.PathLike[str] | RemotePath, purge_step: int | None = None):
        self.path = place_of(path).absolute()  # where a new column writes it anew, whatever folder is current
        require_text(self.path)
        self._names = ["step"]
        if purge_step is None:
            require_no_log(self.path)
        rows = [] if purge_step is None else self._earlier_rows(purge_step)
        self._file = self._write(rows)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        new = [name for name in values if name not in self._names]
        if new:
            self._file.close()
            rows = self._rows()
            self._names += new
            self._file = self._write(rows)
        with full_disk_named(self.path):
            self._writer().writerow({"step": step, **values})
            self._file.flush()

    def close(self) -> None:
        with full_disk_named(self.path):  # what could not be written is tried again
            self._file.close()

    def _rows(self) -> list[dict[str, str]]:
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    def _earlier_rows(self, purge_step: int) -> list[dict[str, str]]:
        """The rows before a step; an unfinished last line is none."""
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            self._names = next(csv.reader(file), [])
        if self._names[:1] != ["step"]:
            raise ValueError(f"{self.path} is no log: its first column is not 'step'")
        return [
            row for row in self._rows() if (row["step"] or "").isdigit() and int(row["step"]) < purge_step
        ]

    def _write(self, rows: list[dict[str, str]]) -> IO[str]:
        """A file with these rows, open for more."""
        with atomic_write(self.path) as part, part.open("w", newline="") as self._file:
            writer = self._writer()
            writer.writeheader()
            writer.writerows(rows)
        return self.path.open("a", newline="")

    def _writer(self) -> csv.DictWriter:
        return csv.DictWriter(self._file, self._names, lineterminator="\n")


@typed
class JSONLinesLogger(Logger):
    """An object for each call of `log` on a line of its own, ``{"step": 3, "loss": 4.5, ...}``.

    Numbers that JSON lacks (NaN, infinity) become null.

    Args:
        path: as of `CSVLogger`; ``"-"`` is standard output.
        purge_step: as of `CSVLogger`.
    """

    __reduce_ex__ = _NO_COPY

    def __init__(self, path: str | os.PathLike[str] | RemotePath, purge_step: int | None = None):
        self._file: IO[str] = sys.stdout
        self._path: Place = Path("standard output")
        if str(path) == "-":
            return
        target = self._path = place_of(path)
        if isinstance(target, RemotePath):
            target.require_writable()
        target.parent.mkdir(parents=True, exist_ok=True)
        if purge_step is None:
            require_no_log(target)
        elif target.is_file():
            lines = target.read_bytes().splitlines()
            steps = [_step_of(target, at, lines) for at in range(len(lines))]
            earlier = [line for line, step in zip(lines, steps, strict=True) if step < purge_step]
            with atomic_write(target) as part:
                part.write_bytes(b"".join(line + b"\n" for line in earlier))
        self._file = target.open("a")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with full_disk_named(self._path):
            print(json.dumps({"step": step, **finite}), file=self._file, flush=True)

    def close(self) -> None:
        if self._file is not sys.stdout:
            with full_disk_named(self._path):
                self._file.close()


@typed
class TensorBoardLogger(Logger):
    """Scalars for TensorBoard, through `torch.utils.tensorboard`: ``tensorboard --logdir FOLDER`` shows them.

    Args:
        folder: of the event files. purge_step: hide what an earlier run logged there from this step on.

    Raises `tritonrec.optional.MissingPackageError` where the package tensorboard is not installed.
    """

    __reduce_ex__ = _NO_COPY

    def __init__(self, folder: str | os.PathLike[str], purge_step: int | None = None):
        require("tensorboard", "TensorBoardLogger")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(place_of(folder)), purge_step=purge_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def require_no_log(path: str | os.PathLike[str] | RemotePath) -> None:
    """Raise FileExistsError for a file that is there; a pipe or a device is nobody's log."""
    if place_of(path).is_file():
        raise FileExistsError(
            f"{path} is there already: go on with the run that wrote it, or choose another place"
        )


def require_text(path: Place) -> None:
    """Raise ValueError for a folder, a pipe or a device, which are no table, and a URL to read only."""
    if isinstance(path, RemotePath):
        path.require_writable()
    elif path.exists() and not path.is_file():
        raise ValueError(f"{path} is {kind_of(path.stat().st_mode)}, and a log is a regular file")


def _step_of(path: Place, at: int, lines: list[bytes]) -> float:
    """Of a line of JSON; infinity for the last one where it is unfinished. ValueError for another's file."""
    line = lines[at]
    try:
        return operator.index(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        is_cut = isinstance(error, ValueError) and (at or b'{"step": '.startswith(line[:9]))
        if is_cut and at == len(lines) - 1:
            return math.inf
        raise ValueError(
            f"{path}:{at + 1} is no line of a log, and a run that goes on would leave it out: choose another "
            "file"
        ) from error
