"""A lock that also orders work queued on an accelerator."""

from __future__ import annotations

import threading

import torch


class Turn:
    """A lock for state on `device`: whoever takes it queues work behind that of whoever had it before.

    A lane of the pipeline queues its work on a stream of its own. Without the order two lanes that hold the
    lock one after the other may still change the state at the same time.
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
            self._event = torch.accelerator.current_stream(self._device).record_event()
        self._lock.release()
