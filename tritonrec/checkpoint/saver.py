"""Saving beside training, full or incremental."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from ..kernels.arguments import check_rank
from .agreement import Agreement, Gather, alone
from .files import CheckpointError
from .lock import WriterLock
from .manifest import first_missing, read_manifest
from .writer import Saved, Tables, copy_of, save


class Saver:
    """Writes checkpoints on a thread of its own, one at a time, while training goes on::

        with Saver("checkpoints", rank=rank, world_size=world_size, gather=gather, full_every=8) as saver:
            ...
            if saver.next_is_full():
                saver.save(step, dense, tables, meta)
            else:
                saver.save(step, dense, changed_rows, meta, erased=erased_keys)

    All ranks save the same steps in the same order. `gather` is called on the thread, so it needs a process
    group of its own. From here to `close` the directory is this run's: rank 0 holds the lock on it. Where
    there are several ranks, making one is collective.

    Args:
        directory, rank, world_size, gather: see `save`.
        full_every: each full checkpoint is followed by this many less one that hold changes only. After a
            save that failed, at the start, and where files of the last checkpoint are gone, comes a full one.
        around: a context for the thread's work on a save, from its step.

    Raises:
        CheckpointError: another run saves into the directory, or it cannot be made.

    Attributes:
        blocked: seconds that the last `save` kept its caller: waiting for the save before, and copying.
        waited: of these, the seconds it waited for the save before.
        seconds: from the last `save` call until its checkpoint was whole on the disk.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        rank: int = 0,
        world_size: int = 1,
        gather: Gather = alone,
        full_every: int = 1,
        around: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ):
        if full_every < 1:
            raise ValueError(f"full_every must be at least 1, got {full_every}")
        check_rank(rank, world_size)
        self.directory, self.rank, self.world_size, self.gather = Path(directory), rank, world_size, gather
        self.full_every, self.around = full_every, around
        self.blocked = self.waited = self.seconds = 0.0
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._last: Saved | None = None
        self._since_full = 0  # checkpoints since the last full one, that one included; 0: there is none
        self._next_is_full: bool | None = None  # once it is decided
        self._lock = WriterLock(self.directory)
        agreement = self._agreement(f"no checkpoint can be saved in {self.directory}")
        try:
            with agreement.of_all():
                if rank == 0:
                    self._lock.hold()
        except BaseException:
            self._lock.release()
            raise

    def next_is_full(self) -> bool:
        """Whether the next save takes the whole state, rather than what changed since the last save.

        Collective, and the same on all ranks. Waits for a save that is running, and raises what made it fail.
        Where files that changes would build upon are gone, a full one comes, with a warning on rank 0.
        """
        self.wait()
        if self._next_is_full is None:
            self._next_is_full = self._since_full in (0, self.full_every) or self._base_is_gone()
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
        """Take a snapshot of the state, and return while it is being written.

        Waits for the save before, and raises what made it fail; nothing is saved then.

        Args:
            step, dense, tables, meta, erased: see `save` of the package. `tables` hold everything where
                `next_is_full`, and otherwise the rows that changed since the last save.
            owned: the tensors are a snapshot already, which nobody changes until the save is over; without
                it they are copied.
        """
        began = time.perf_counter()
        full = self.next_is_full()
        self.waited = time.perf_counter() - began
        if full != (erased is None):
            raise ValueError(
                f"step {step}: the next checkpoint is {'full' if full else 'incremental'} and takes "
                f"{'no' if full else 'the'} erased keys; ask next_is_full()"
            )
        copied = [
            mapping if owned else {name: copy_of(tensor) for name, tensor in mapping.items()}
            for mapping in (dense, erased or {}, *tables.values())
        ]
        arguments = (step, copied[0], dict(zip(tables, copied[2:], strict=True)), dict(meta))
        options = {} if full else {"base": self._last, "erased": copied[1]}
        self._next_is_full = None
        self._thread = threading.Thread(target=self._write, args=(began, arguments, options), name="saver")
        self._thread.start()
        self.blocked = time.perf_counter() - began

    def wait(self) -> Saved | None:
        """The last checkpoint saved here, once it is whole on the disk; raises what made it fail."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self._last

    def close(self) -> None:
        """Wait for the save that is running, give the lock up, and raise what made the save fail."""
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
            with self.around(arguments[0]):
                self._last = save(
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
            self._failure, self._since_full = error, 0

    def _agreement(self, failed: str) -> Agreement:
        return Agreement(alone if self.world_size == 1 else self.gather, self.rank, failed)

    def _base_is_gone(self) -> bool:
        """Whether the last checkpoint is not on the disk as it was saved; rank 0 looks for all."""
        assert self._last is not None
        agreement = self._agreement(f"{self._last.path} could not be looked at")
        with agreement.of_all() as report:
            if self.rank == 0:
                report["flaw"] = _flaw_of(self._last)
        flaw = agreement.reports[0]["flaw"]
        if flaw and self.rank == 0:
            warnings.warn(
                f"{flaw}, and changes would build upon it: a full checkpoint is saved instead",
                RuntimeWarning,
                stacklevel=3,
            )
        return bool(flaw)


def _flaw_of(saved: Saved) -> str | None:
    """What is not on the disk of a checkpoint as it was saved, in words; files by their length alone."""
    try:
        body = read_manifest(saved.path)
    except CheckpointError as error:
        return str(error)
    if body["manifest_sha256"] != saved.sha256:
        return f"{saved.path} is another checkpoint than the one saved last"
    return first_missing(saved.path.parent, body)
