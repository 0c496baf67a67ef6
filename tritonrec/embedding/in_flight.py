"""Exclusive access of a trainer's lanes to tables and optimizers while windows are in flight, and what others
write between runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

_thread = threading.local()


class as_lane:
    """Make this thread a lane inside the block: it may use state that is in flight."""

    def __enter__(self) -> None:
        self._before, _thread.lane = is_lane(), True

    def __exit__(self, *error: object) -> None:
        _thread.lane = self._before


def is_lane() -> bool:
    """Whether this thread runs a lane's code."""
    return getattr(_thread, "lane", False)


def check_trainable() -> None:
    """Raise RuntimeError under ``torch.inference_mode()``, whose tensors no update may write to."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "what is made or loaded under torch.inference_mode() cannot be trained: do it outside, or take "
            "torch.no_grad()"
        )


class InFlight:
    """Guard of one table or optimizer from the first window in flight to the last.

    Args:
        name: of the state, in messages.

    Attributes:
        update: the last update of the state, counted from 0; -1 before the first and after a load.
        number: how often windows began to be in flight, which all ranks do alike.
        written: how often an update of the state has begun.
    """

    def __init__(self, name: str):
        self.name, self.update, self.number, self.written = name, -1, 0, 0
        self._steps: Callable[[], str] | None = None

    @property
    def active(self) -> bool:
        """Whether windows are in flight."""
        return self._steps is not None

    def begin(self, steps: Callable[[], str]) -> None:
        """Start the guard; ``steps()`` names the windows in flight, as in "steps 4 to 6 are".

        Raises RuntimeError where another trainer has windows in flight.
        """
        self.check("another trainer's use")
        self._steps = steps
        self.number += 1

    def end(self) -> None:
        """End the guard."""
        self._steps = None

    def check(self, action: str) -> None:
        """Raise RuntimeError where windows are in flight and this thread is no lane."""
        if self._steps is not None and not is_lane():
            raise RuntimeError(in_flight_message(f"{action} of {self.name}", self._steps()))


def in_flight_message(action: str, steps: str) -> str:
    """The error message for an `action` that is refused; `steps` as in "steps 4 to 6 are"."""
    return (
        f"{action} is refused while {steps} in flight, whose lanes change it: take their results first "
        "with list(trainer.run([])), or let the run end, or pause (pause_every=), "
        "at the step whose state is needed"
    )


class WrittenRows:
    """The keys of rows of a table that were written by others than lanes, since the last `take`: ranks with
    copies of the table compare them as the next run begins.
    """

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._all = True  # those that are there when it begins

    def add(self, keys: torch.Tensor | None) -> None:
        """Note `keys` (K,) int64, or None where they are not known."""
        if is_lane():
            return
        if keys is None:
            self._all, self._keys = True, []
        elif not self._all:
            self._keys.append(keys.cpu().clone())

    def take(self, keys: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Their keys (n,) int64 on the host, ascending, of a table with these `keys`."""
        known = (
            [keys().cpu()] if self._all else [torch.empty(0, dtype=torch.int64, device="cpu"), *self._keys]
        )
        self.clear()
        return torch.cat(known).unique()

    def clear(self) -> None:
        """Forget them: all ranks have written the same."""
        self._keys, self._all = [], False
