"""Following a trainer: what it publishes is served, version by version."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread
from typing import TYPE_CHECKING

from .model import Served

if TYPE_CHECKING:
    from ..live import Follower
    from ..spread_rows import SpreadFollower

log = logging.getLogger("tritonrec.server")


class Following:
    """A thread that polls, and gives each version to a `Served`.

    A failure does not end it: `error` says what it was, and the version before is served on.
    """

    def __init__(self, served: Served, open: Callable[[], Follower | SpreadFollower], seconds: float = 0.05):
        self._served, self._open, self._seconds = served, open, seconds
        self.follower: Follower | SpreadFollower | None = None
        self.error: str | None = None
        self._taken: int | None = None
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
        wait = 0.0
        while not self._stop.wait(wait):
            try:
                self._advance()
                self.error, wait = None, self._seconds
            except Exception as error:
                if str(error) != self.error:
                    log.error("the trainer cannot be followed now: %s", error)
                self.error, wait = str(error) or type(error).__name__, 1.0

    def _advance(self) -> None:
        if self.follower is None:
            self.follower = self._open()
        try:
            self.follower.poll()
        finally:  # also what came before a failure, and what could not be taken over the last time
            now = self.follower
            if now.sequence != self._taken:
                self._served.use(now.predictor, now.sequence, now.published_at)
                self._taken = now.sequence
