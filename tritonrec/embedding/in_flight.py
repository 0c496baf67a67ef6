"""Exclusive access of a trainer's lanes to tables and optimizers while windows are in flight."""

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
