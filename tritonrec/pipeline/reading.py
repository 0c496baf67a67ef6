"""Stage 1 reads the caller's batches: on the ``prefetch`` lane, under the settings of the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import copy_context
from time import perf_counter_ns

from .. import ops
from ..data import Batch
from ..data.slices import Slices, collected
from ..distributed.watch import Watch
from ..kernels.dispatch import computes_eagerly, default_impl
from ..trace import SupportsRecording
from .executor import Call, Executor
from .flight import Flight
from .interrupts import uninterrupted
from .model_call import CallerSettings

LANE = "prefetch"


class BatchReader:
    """Reads the batches of one update after the other from an iterator of the caller's.

    A batch is a slice ``load`` of the trace, and what its source does (`data.slices.work`) are slices inside.
    An error of the iterator is the caller's own, with a note that names the batch; windows in flight go on.

    Args:
        executor: its ``prefetch`` lane reads; None: the caller's thread, as everything else.
        count: batches of an update. watch: of this rank.
    """

    def __init__(
        self,
        executor: Executor | None,
        count: int,
        recorder: SupportsRecording,
        flight: Flight,
        watch: Watch,
    ):
        self._executor, self._count = executor, count
        self._recorder, self._flight, self._watch = recorder, flight, watch
        self._last: int | None = None  # step of the last batch that was read
        self._call: Call[list[Batch]] | None = None  # under way, or not taken since an interrupt

    def read(self, iterator: Iterator[Batch], settings: CallerSettings) -> list[Batch]:
        """The batches of the next update, fewer where `iterator` ends; [] at its end.

        After an interrupt the batches that were being read come first.
        """
        self.wait(iterator, settings)
        if self._call is None:
            return self._batches(iterator)
        batches, self._call = self._call.result(), None
        return batches

    def wait(self, iterator: Iterator[Batch], settings: CallerSettings) -> None:
        """Return when the lane has the batches that `read` returns; raises what the iterator raises."""
        if self._executor is None:
            return
        if self._call is None:
            context, impl = copy_context(), default_impl()

            def work() -> list[Batch]:
                self._flight.reader = threading.get_ident()
                # Another lane may compile the model meanwhile, and a loader something of its own.
                with settings.applied(), computes_eagerly(), ops.use_impl(impl), computes_eagerly(False):
                    return self._batches(iterator)

            # An interrupt between the start and the assignment would lose the call, and the batches that it
            # reads.
            with uninterrupted():
                self._call = self._executor.call(LANE, lambda: context.run(work))
        try:
            self._executor.result(self._call)
        except BaseException:
            if self._call.failed:  # else it is an interrupt of this thread, and the call goes on
                self._call = None
            raise

    def _batches(self, iterator: Iterator[Batch]) -> list[Batch]:
        batches: list[Batch] = []
        times: Slices = []
        with self._watch.doing("reading of batches"), collected() as slices:
            while len(batches) < self._count:
                start = perf_counter_ns()
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                except Exception as error:
                    after = "the first batch" if self._last is None else f"the batch after step {self._last}"
                    error.add_note(f"while {after} was read")
                    raise
                times.append(("load", start, perf_counter_ns()))
                if not isinstance(batch, Batch):
                    raise TypeError(
                        f"a trainer takes batches of tritonrec.data.Batch, got {type(batch).__name__}: a "
                        "DataLoader makes them in its collate_fn"
                    )
                batches.append(batch)
                self._last = batch.step
        for name, start, end in [*times, *slices] if batches else []:
            self._recorder.add(LANE, name, start, end, batch=batches[-1].step)
        return batches
