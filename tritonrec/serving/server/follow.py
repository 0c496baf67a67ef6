"""Following a trainer: what it publishes is served, version by version."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread
from typing import Protocol

from ..predictor import Predictor
from .model import Served

log = logging.getLogger("tritonrec.server")


class Follows(Protocol):
    """What `tritonrec.serving.live.Follower` offers.

    predictor: of the newest whole version, another object after each. step, sequence: of it. published_at:
    its time in seconds since 1970.
    """

    predictor: Predictor
    step: int
    sequence: int
    published_at: float

    def poll(self) -> bool:
        """Whether there is another version since the last call."""

    def lag_seconds(self) -> float:
        """How old is what the trainer has published since."""


def open_follower(url: str) -> Follows:
    """Of `tritonrec.serving.live`, which is imported here alone."""
    from importlib import import_module

    return import_module("tritonrec.serving.live").Follower.open(url)


class Following:
    """A thread that polls, and gives each version to a `Served`.

    A failure does not end it: `error` says what it was, and the version before is served on.
    """

    def __init__(self, served: Served, open: Callable[[], Follows], seconds: float = 0.05):
        self._served, self._open, self._seconds = served, open, seconds
        self.follower: Follows | None = None
        self.error: str | None = None
        self._stop = Event()
        self._thread = Thread(target=self._run, name="tritonrec follows", daemon=True)
        self._thread.start()

    @property
    def lag_seconds(self) -> float | None:
        """Of the follower; None before it is there."""
        return None if self.follower is None else self.follower.lag_seconds()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        wait, due = 0.0, False
        while not self._stop.wait(wait):
            try:
                if self.follower is None:
                    self.follower, due = self._open(), True
                due = self.follower.poll() or due  # what could not be taken over is tried again
                if due:
                    self._served.use(
                        self.follower.predictor, self.follower.sequence, self.follower.published_at
                    )
                due, self.error, wait = False, None, self._seconds
            except Exception as error:
                if str(error) != self.error:
                    log.error("the trainer cannot be followed now: %s", error)
                self.error, wait = str(error) or type(error).__name__, 1.0
