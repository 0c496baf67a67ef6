"""Numbers that only the device knows, and upper bounds of them on the host."""

from __future__ import annotations

import torch


class DeviceNumbers:
    """`count` int64 numbers on a device, 0 at first; the host knows them, or bounds of them, without a wait.

    On the CPU the bounds are the numbers. On an accelerator each change queues a copy to the host, unless one
    is on its way; until the next copy arrives, the bounds rise with every change.
    """

    def __init__(self, count: int, device: torch.device):
        self.values = torch.zeros(count, dtype=torch.int64, device=device)
        self._known = [0] * count
        self._rises: list[tuple[int, ...]] = []  # since `_known`
        self._copied = 0  # of these rises are in the copy on its way
        self._event: torch.Event | None = None
        self._copy = self.values
        if device.type != "cpu":
            self._copy = torch.zeros(count, dtype=torch.int64, pin_memory=True, device="cpu")

    def add(self, change: torch.Tensor, rise: tuple[int, ...]) -> None:
        """Add `change` (count,) to the numbers; no entry of it is above that of `rise`."""
        self.values += change
        if self._copy is self.values:
            return
        self._rises.append(rise)
        self._arrive()
        if self._event is None:
            self._copy.copy_(self.values, non_blocking=True)
            self._event = torch.accelerator.current_stream(self.values.device).record_event()
            # The copy holds what was queued before it: these
            # rises are in it, later ones still have to be added.
            self._copied = len(self._rises)

    def bound(self, index: int) -> int:
        """An upper bound of one number."""
        if self._copy is self.values:
            return int(self.values[index])
        self._arrive()
        return self._known[index] + sum(rise[index] for rise in self._rises)

    def reset(self, index: int) -> None:
        """Set one number to 0; a copy on its way still brings what it was, which is a bound."""
        self.values[index] = 0
        self._known[index] = 0
        self._rises = [(*rise[:index], 0, *rise[index + 1 :]) for rise in self._rises]

    def exact(self) -> list[int]:
        """The numbers; waits for the device."""
        return self.values.tolist()

    def _arrive(self) -> None:
        """Take a copy that has arrived."""
        # Asked, not waited for.
        if self._event is not None and self._event.query():
            self._known, self._rises, self._event = self._copy.tolist(), self._rises[self._copied :], None


class Arriving:
    """A copy of `values` (n,) int64 on its way from the device to the host."""

    def __init__(self, values: torch.Tensor):
        self._copy = values
        self._event: torch.Event | None = None
        if values.device.type != "cpu":
            self._copy = torch.empty(values.shape, dtype=torch.int64, pin_memory=True, device="cpu")
            self._copy.copy_(values, non_blocking=True)
            self._event = torch.accelerator.current_stream(values.device).record_event()

    def take(self) -> list[int]:
        """The numbers; waits where they have not arrived."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._copy.tolist()
