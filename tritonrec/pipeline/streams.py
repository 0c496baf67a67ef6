"""Where a lane's work runs: at once on the host, or queued on a stream of an accelerator.

A lane of the executor is a host thread. On an accelerator it only queues work on the lane's stream and goes
on, so that a task which has "finished" on the host may still be under way on the device. What holds the edges
of a schedule there are events: a task's stream waits for the events of the tasks in other lanes that it
depends on, and inside a lane the stream keeps the order. The same schedule tables run on both.

`torch.Stream` and `torch.Event` are those of whatever accelerator torch has: CUDA, ROCm, Ascend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Streams:
    """Work runs at once, on the lane's own thread."""

    def begin(self) -> None:
        """Before the first work of an empty pipeline: what the caller has queued comes before it."""

    def run(self, lane: str, after: Sequence[Any], work: Callable[[], None]) -> Any:
        """Run or queue `work` on the lane behind the events `after` of other lanes.

        Returns the event of its end, or None where it has ended.
        """
        work()

    def mark(self, lane: str) -> Any:
        """The event of all that the lane's work, under way on this thread, has queued so far."""

    def finish(self, event: Any) -> None:
        """Return when the event's work has ended; raises what made it fail."""


class DeviceStreams(Streams):
    """A stream of an accelerator for each lane.

    Args:
        device: an accelerator's device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._streams: dict[str, torch.Stream] = {}

    def begin(self) -> None:
        # The host waits, which costs nothing where nothing is under way.
        torch.accelerator.synchronize(self.device)

    def run(self, lane: str, after: Sequence[torch.Event], work: Callable[[], None]) -> torch.Event:
        if lane not in self._streams:
            self._streams[lane] = torch.Stream(self.device)
        stream = self._streams[lane]
        for event in after:
            stream.wait_event(event)
        with stream:
            work()
        return stream.record_event()

    def mark(self, lane: str) -> torch.Event:
        """See `Streams`."""
        return self._streams[lane].record_event()

    def finish(self, event: torch.Event) -> None:
        event.synchronize()


def streams_for(device: torch.device) -> Streams:
    """The streams of a device."""
    return Streams() if device.type == "cpu" else DeviceStreams(device)


def launches_in_turn(device: torch.device, world_size: int) -> bool:
    """Whether collectives of several groups need one order of launches on all ranks.

    Those of an accelerator wait for the other ranks on the device: where two ranks launch two of them in
    different orders, each may occupy its device and wait for the other. Those of the host do not.
    """
    return device.type != "cpu" and world_size > 1


def lanes_of_one_thread(streams: Streams, world_size: int, parts: bool) -> tuple[str, ...]:
    """Lanes that share a thread, because none of them ever waits for another rank, for a device, or (`parts`)
    for a part of another lane's task, which would be queued behind it.

    Such lanes overlap nothing but each other's Python, and take turns at the interpreter's lock for it.
    Lanes that read batches and tables ahead keep threads of their own.
    """
    alone = type(streams) is Streams and world_size == 1 and not parts
    return ("copy", "communication", "compute", "reduce") if alone else ()


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device through page-locked memory, queued on the current stream; itself on the CPU."""
    if device.type == "cpu" or values.device.type == device.type:
        return values
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked host memory, complete when this returns; itself on the CPU."""
    if values.device.type == "cpu":
        return values
    staged = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
    staged.copy_(values, non_blocking=True)
    torch.accelerator.current_stream(values.device).synchronize()
    return staged
