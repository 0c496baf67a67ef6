"""State of a table that lanes share, whose work may be queued on streams: locks, and columns."""

from __future__ import annotations

import threading

import torch


class StreamLock:
    """A lock that also orders device work: each holder's stream waits for the previous holder's.

    A lane of the pipeline queues its work on a stream of its own. Without the order two lanes that hold the
    lock one after the other may still change the state at the same time. The order takes in everything that
    the other lane has queued: a lookup that takes turns with the update before it waits for the sums of that
    update, so that nothing overlaps any more.
    """

    def __init__(self, device: torch.device):
        self._lock, self._device = threading.Lock(), device
        self._event: torch.Event | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)

    def __exit__(self, *exc: object) -> None:
        if self._device.type != "cpu":
            # Before the release: the next holder has to find it.
            self._event = torch.accelerator.current_stream(self._device).record_event()
        self._lock.release()


class Replaceable:
    """A tensor that one lane replaces while others use it.

    Work that uses it is queued behind what filled it, and its memory lasts until that work is done.
    """

    def __init__(self, values: torch.Tensor):
        self.replace(values)

    def get(self) -> torch.Tensor:
        """The tensor, for work on the current stream."""
        values, filled = self._now  # one read: another thread may replace both
        if filled is not None:
            torch.accelerator.current_stream(values.device).wait_event(filled)
            use_here(values)
        return values

    def replace(self, values: torch.Tensor) -> None:
        """Take `values`, which work on the current stream fills."""
        filled: torch.Event | None = None
        if values.device.type != "cpu":
            filled = torch.accelerator.current_stream(values.device).record_event()
        self._now = values, filled


def use_here(values: torch.Tensor) -> None:
    """Make the memory of `values` last until what the current stream has queued so far is done.

    Needed where the host drops a tensor that another stream may have made: its memory goes back to that one.
    """
    if values.device.type != "cpu":
        values.record_stream(torch.accelerator.current_stream(values.device))


class RowColumn:
    """Values of one type by handle, 0 at first; grown by doubling.

        handle    0    1    2    3   -1       a handle of -1 reads the last value, and writes nothing
        value     5    0    2    0   absent

    A lane may read values that no other one writes while another lane grows the column.

    Args:
        dtype: of the values.
        absent: the value of a handle of -1.
        end: initial number of handles.
        device: of the values.
    """

    def __init__(self, dtype: torch.dtype, absent: int = 0, end: int = 0, device: torch.device | None = None):
        self._absent = absent
        values = torch.zeros(end + 1, dtype=dtype, device=device or "cpu")
        values[-1] = absent
        self._values = Replaceable(values)

    @property
    def rows(self) -> torch.Tensor:
        """A view of the values by handle, at least as many as there are handles."""
        return self._values.get()[:-1]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._values.get().nbytes

    def __getitem__(self, handles: torch.Tensor) -> torch.Tensor:
        return self._values.get()[handles]

    def __setitem__(self, handles: torch.Tensor, values: torch.Tensor | int) -> None:
        own = self._values.get()
        own[handles] = values
        own[-1] = self._absent

    def grow(self, end: int) -> None:
        """Extend the values to every handle below `end`."""
        rows = self.rows
        if end > len(rows):
            larger = rows.new_zeros(max(end, 2 * len(rows)) + 1)
            larger[: len(rows)] = rows
            larger[-1] = self._absent
            self._values.replace(larger)
