"""Where compiled kernels are kept, also in a container whose home and packages cannot be written.

numba keeps compiled kernels in ``$NUMBA_CACHE_DIR``, beside the source or in the home folder, and refuses to
compile where it can write to none of them; so does Triton with ``$TRITON_CACHE_DIR`` and
``~/.triton/cache``. Here a private folder among the temporary files takes their place, or nothing is kept,
and one warning says so.
"""

from __future__ import annotations

import multiprocessing
import os
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as once
from pathlib import Path
from typing import Any

compiling: list[Callable[[], None]] = []
"""Called once each, when numba compiles a kernel that it does not find in its cache."""

SLOW_SECONDS = 1.0
"""Of compilation, all kernels together, after which one line says what is going on."""


def note_compilation() -> None:
    """Something is compiled now, that the steps to come will not compile again."""
    called, compiling[:] = list(compiling), []  # one that registers itself again waits for the next kernel
    for call in called:
        call()


def njit(*, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit``, whose `cache` never fails and never gives the code of another signature or source."""
    import numba

    _watch_numba()

    def compiled(function: Callable[..., Any]) -> Any:
        kernel = numba.njit(**options)(function)
        if cache:
            keep_on_disk(kernel, function)
        return kernel

    return compiled


def keep_on_disk(compiled: Any, function: Callable[..., Any]) -> None:
    """Give what numba made of `function` a cache (`kernel_cache`), where a folder can be written."""
    import numba

    from .kernel_cache import AheadCache, KernelCache

    try:
        compiled._cache = KernelCache(function)
        return
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
    folder = _instead("numba", "NUMBA_CACHE_DIR")
    if folder is None:
        compiled._cache = AheadCache(function)
        return
    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        compiled._cache = KernelCache(function)
    finally:
        config.CACHE_DIR = before


@contextmanager
def announced() -> Iterator[None]:
    """For the time in which another process compiles what this one needs."""
    note_compilation()
    _announcement.begin()
    try:
        yield
    finally:
        _announcement.end()


@once
def _watch_numba() -> None:
    from numba.core import event

    class Compiling(event.Listener):
        def on_start(self, _event: event.Event) -> None:
            note_compilation()
            _announcement.begin()

        def on_end(self, ended: event.Event) -> None:
            _announcement.end()
            kept = ended.data["dispatcher"]._cache
            if sys.exc_info()[0] and hasattr(kept, "end_turns"):  # it failed: numba will save nothing
                kept.end_turns()

    event.register("numba:compile", Compiling())


class _Announcement:
    """One line on standard error, of the first rank alone, where compilation takes long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0  # calls of the compiler, which calls itself
        self._left = SLOW_SECONDS
        self._began = 0.0
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        with self._lock:
            self._running += 1
            if self._running == 1 and self._left > 0 and _is_first_rank():
                self._began = time.monotonic()
                self._timer = threading.Timer(self._left, self._say)
                self._timer.daemon = True
                self._timer.start()

    def end(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0 and self._timer is not None:
                self._timer.cancel()
                self._timer = None
                self._left -= time.monotonic() - self._began

    def _say(self) -> None:
        with self._lock:
            self._left = 0.0
        print("tritonrec: compiling kernels, on the first run only, up to a minute", file=sys.stderr)


_announcement = _Announcement()


@once
def prepare_triton() -> None:
    """Set ``$TRITON_CACHE_DIR`` where Triton could not write to its own choice."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    chosen = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    if os.path.isabs(chosen) and _writable(Path(chosen)):
        return
    folder = _instead("triton", "TRITON_CACHE_DIR")
    if folder is not None:
        os.environ["TRITON_CACHE_DIR"] = str(folder)


@once
def _instead(compiler: str, variable: str) -> Path | None:
    """A folder for what `compiler` compiles, or None; says so, in the first rank only."""
    folder = _private_folder(f"tritonrec-{compiler}-cache")
    if _is_first_rank():
        kept = f"they go to {folder}" if folder else "they are compiled again in each process"
        warnings.warn(
            f"tritonrec: the folders for kernels compiled by {compiler} cannot be written: {kept}. Set "
            f"{variable} to a writable folder to keep them",
            RuntimeWarning,
            stacklevel=2,
        )
    return folder


def _is_first_rank() -> bool:
    """Whether this process speaks for all ranks."""
    first = multiprocessing.current_process().name in ("MainProcess", "rank 0")
    return first and not int(os.environ.get("RANK") or 0)


def _private_folder(name: str) -> Path | None:
    """A folder among the temporary files that this user alone can write to: what lies there is executed."""
    try:
        user = os.geteuid() if hasattr(os, "geteuid") else 0
        folder = Path(tempfile.gettempdir()) / f"{name}-{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        own = stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077
        return folder if own and _writable(folder) else Path(tempfile.mkdtemp(prefix=f"{name}-"))
    except OSError:
        return None


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
