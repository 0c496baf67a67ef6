"""State of a table that lanes share, whose work is queued on streams of an accelerator."""

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
