"""Asynchronous checkpoints, full or incremental."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from torch import Tensor

from ..files.places import Place, place_of
from ..kernels.arguments import check_rank
from ..settings import no_copy, typed
from .agreement import Agreement, Gather, single_rank
from .files import CheckpointError
from .lock import WriterLock
from .manifest import first_missing, read_manifest
from .rows import close_rows
from .writer import Saved, Tables, copy_of, save

MOST_LAYERS = 256
"""Saves of changes after which one is full where bytes decide: a load opens files of each."""


@typed
class Saver:
    """Writes checkpoints on a background thread, one at a time, while training goes on::

        with Saver("checkpoints", rank=rank, world_size=world_size, gather=gather, full_every=8) as saver:
            ...
            if saver.next_is_full():
                saver.save(step, dense, tables, meta)
            else:
                saver.save(step, dense, changed_rows, meta, erased=erased_keys)

    All ranks save the same steps in the same order. `gather` is called on the thread and needs a process
    group of its own. Rank 0 holds the lock of the directory until `close`. The constructor is collective.

    Args:
        directory, rank, world_size, gather: see `save`.
        full_every: one checkpoint of this many is full, the others are incremental; 0: once the files of
            changes since the last full one have as many bytes as its own, or are of `MOST_LAYERS` saves.
            The first one is also full, and one after a failed save, one at the step of the last checkpoint,
            or after files of that were removed.
        context: makes a context manager for the thread's work, from the step.
        write: called as `save` of the package is, to write a checkpoint elsewhere. Where it returns None,
            as on all ranks then, the next one is full.

    Raises:
        CheckpointError: another run saves into the directory, or it cannot be created.

    Attributes:
        blocked: seconds that the last `save` blocked its caller: the wait for the previous save, and copies.
        waited: seconds of `blocked` spent on that wait.
        seconds: from the last call of `save` until its checkpoint was complete on the disk.
    """

    __reduce_ex__ = no_copy("one alone writes into its folder; make it in the process that saves")

    def __init__(
        self,
        directory: Place | str,
        *,
        rank: int = 0,
        world_size: int = 1,
        gather: Gather = single_rank,
        full_every: int = 1,
        context: Callable[[int], AbstractContextManager[object]] = nullcontext,
        write: Callable[..., Saved | None] = save,
    ):
        if full_every < 0:
            raise ValueError(f"full_every must be 0 or more, got {full_every}")
        check_rank(rank, world_size)
        self.directory = place_of(directory).absolute()  # a thread writes later, wherever the program is then
        self.rank, self.world_size, self.gather = rank, world_size, gather
        self.full_every, self.context, self.write = full_every, context, write
        self.blocked = self.waited = self.seconds = 0.0
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._last: Saved | None = None
        self._since_full = 0  # checkpoints from the last full one on; 0: there is none
        self._next_is_full: bool | None = None  # None: not decided yet
        self._lock = WriterLock(self.directory)
        agreement = self._agreement(f"no checkpoint can be saved in {self.directory}")
        try:
            with agreement.phase():
                if rank == 0:
                    self._lock.acquire()
        except BaseException:
            self._lock.release()
            raise

    def follow(self, saved: Saved, layers: int) -> None:
        """Save changes of `saved`, of so many `layers` in this directory, which was loaded on all ranks.

        The caller logs changes from then on.
        """
        self.wait()
        self._last, self._since_full, self._next_is_full = saved, layers, None

    def lose(self) -> None:
        """The changes since the last save are lost: the next one is full. On all ranks."""
        self._since_full, self._next_is_full = 0, None

    def next_is_full(self, step: int | None = None) -> bool:
        """Whether the next save, at `step`, takes the whole state, rather than the changes since the last.

        Collective, and the same on all ranks. Waits for a running save, and raises its error. If files that
        an incremental checkpoint needs are missing, the next one is full, with a warning on rank 0.
        """
        self.wait()
        if self._next_is_full is None:
            self._next_is_full = (
                self._since_full == 0
                or self._last is None  # `write` gave none
                or self._since_full >= (self.full_every or MOST_LAYERS)
                or self._last.step == step  # its manifest is replaced
                or self._base_is_unfit()
            )
        return self._next_is_full

    def save(
        self,
        step: int,
        dense: Mapping[str, Tensor],
        tables: Tables,
        meta: Mapping[str, Any],
        *,
        erased: Mapping[str, Tensor] | None = None,
        owned: bool = False,
    ) -> None:
        """Copy the state and start to write it.

        Waits for the previous save, and raises its error; then nothing is saved.

        Args:
            step, dense, tables, meta, erased: see `save` of the package. `tables` have all rows if
                `next_is_full`, otherwise the rows that changed since the last save. `Rows` are read while
                they are written, and closed.
            owned: do not copy the tensors; the caller leaves them unchanged until the save has ended.
        """
        began = time.perf_counter()
        try:
            full = self.next_is_full(step)
            self.waited = time.perf_counter() - began
            if full != (erased is None):
                raise ValueError(
                    f"step {step}: the next checkpoint is {'full' if full else 'incremental'} and takes "
                    f"{'no' if full else 'the'} erased keys: see next_is_full()"
                )
        except BaseException:
            # A snapshot that nobody reads would go on copying rows before each update.
            close_rows(tables)
            raise

        def copy(values: Any) -> Any:
            if owned or not isinstance(values, Mapping):
                return values
            return {name: copy_of(tensor) for name, tensor in values.items()}

        arguments = (step, copy(dense), {name: copy(rows) for name, rows in tables.items()}, dict(meta))
        options = {} if full else {"base": self._last, "erased": copy(erased)}
        self._next_is_full = None
        self._thread = threading.Thread(target=self._write, args=(began, arguments, options), name="saver")
        self._thread.start()
        self.blocked = time.perf_counter() - began

    def wait(self) -> Saved | None:
        """Wait for the last save; returns its checkpoint, or raises its error."""
        if self._thread is not None:
            # No lock: what the thread writes is read after this join alone.
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self._last

    def close(self) -> None:
        """Wait for the last save, release the lock, and raise the error of the save."""
        try:
            self.wait()
        finally:
            self._lock.release()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Besides: {failure}")

    def _write(self, began: float, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        try:
            with self.context(arguments[0]):
                self._last = self.write(
                    self.directory,
                    *arguments,
                    rank=self.rank,
                    world_size=self.world_size,
                    gather=self.gather,
                    lock=self._lock,
                    **options,
                )
            self._since_full = self._since_full + 1 if options else 1
            self.seconds = time.perf_counter() - began
        except Exception as error:
            # The changes of the failed save are lost to the log: only a whole checkpoint has them.
            self._failure, self._since_full = error, 0
        finally:
            close_rows(arguments[2])

    def _agreement(self, failed: str) -> Agreement:
        return Agreement(single_rank if self.world_size == 1 else self.gather, self.rank, failed)

    def _base_is_unfit(self) -> bool:
        """Whether files of the last checkpoint are missing or changed, or the changes in it, where that is
        the rule, outweigh the rest; rank 0 checks for all.
        """
        assert self._last is not None
        agreement = self._agreement(f"{self._last.path} could not be checked")
        with agreement.phase() as report:
            if self.rank == 0:
                report["problem"], report["outweighed"] = _base_on_disk(self._last)
        problem, outweighed = (agreement.reports[0][name] for name in ("problem", "outweighed"))
        if problem and self.rank == 0:
            warnings.warn(
                f"{problem}, and an incremental checkpoint needs it: a full checkpoint is saved instead",
                RuntimeWarning,
                stacklevel=3,
            )
        return bool(problem) or (outweighed and not self.full_every)


def _base_on_disk(saved: Saved) -> tuple[str | None, bool]:
    """An error about a saved checkpoint's manifest and file lengths on the disk, None if they are right;
    whether its files of changes have as many bytes as those below them.
    """
    try:
        body = read_manifest(saved.path)
    except CheckpointError as error:
        return str(error), False
    if body["manifest_sha256"] != saved.sha256:
        return f"{saved.path} is another checkpoint than the one saved last", False
    first = written = 0
    for table in body["tables"].values():
        sizes = [sum(part["bytes"] for part in layer["parts"]) for layer in table["layers"]]
        first, written = first + sizes[0], written + sum(sizes)
    return first_missing(saved.path.parent, body), written >= 2 * first
