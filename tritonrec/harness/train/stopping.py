"""The first Ctrl-C or SIGTERM asks for an end after the current step, the second ends the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
ASK_AGAIN_SECONDS = 0.5
"""Ranks of a pool forget what was asked of them before they read their task."""
END_SECONDS = 5.0
"""After a second signal, for what ends first: a lane may compile a kernel, which nothing stops."""


class Begun(Protocol):
    """Whether there is a step that a stop would lose; a `threading.Event`, say."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...


@dataclass
class BegunHere:
    """`Begun` of all processes of this machine that have this `path`, of no file before."""

    path: Path

    def set(self) -> None:
        self.path.touch()

    def is_set(self) -> bool:
        return self.path.exists()


@dataclass
class Stop:
    """`signal` is the number of the signal that came, 0 without one."""

    signal: int = 0

    @property
    def exit_code(self) -> int:
        """As a shell has it."""
        return 128 + self.signal if self.signal else 0


@contextmanager
def graceful_stop(
    request: Callable[[], None], after: str = "step", begun: Begun | None = None
) -> Iterator[Stop]:
    """Inside, the first SIGINT, SIGTERM or SIGHUP calls `request`; a second one raises SystemExit. A third,
    or `END_SECONDS`, ends the process.

    Before `begun` is set there is nothing to lose, and the first signal is as a second one: the first step
    may compile kernels for a minute.

    `request` is called from another thread, again and again until the end. Ignored signals stay ignored.
    `after` says in the message where the end will be. Outside of the main thread, where Python allows no
    handlers, nothing changes.
    """
    stop, over = Stop(), threading.Event()
    ending = list[threading.Timer]()

    def ask() -> None:
        while not over.is_set():
            request()
            over.wait(ASK_AGAIN_SECONDS)

    def handle(number: int, _frame: FrameType | None) -> None:
        if ending:
            os._exit(128 + number)
        if stop.signal or (begun is not None and not begun.is_set()):
            ending.append(threading.Timer(END_SECONDS, os._exit, [128 + number]))
            ending[0].daemon = True
            ending[0].start()
            raise SystemExit(128 + number)
        stop.signal = number
        again = " (Ctrl-C again ends at once)" if number == signal.SIGINT else ""
        os.write(2, f"\nstopping after this {after}{again}\n".encode())
        threading.Thread(target=ask, name="stop", daemon=True).start()

    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        over.set()
        for timer in ending:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
