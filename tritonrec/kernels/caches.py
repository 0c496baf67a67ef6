"""Where compiled kernels are kept, also in a container whose home and packages cannot be written.

numba keeps compiled kernels in ``$NUMBA_CACHE_DIR``, beside the source or in the home folder, and refuses to
compile where it can write to none of them; so does Triton with ``$TRITON_CACHE_DIR`` and
``~/.triton/cache``. Here a private folder among the temporary files takes their place, or nothing is kept,
and one warning says so.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any

from .compilation import announcement, is_first_rank, note_compilation


def njit(*, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit``, whose `cache` never fails and never gives the code of another signature or source.

    Raises RuntimeError where numba is told to compile nothing: kernels call intrinsics, which Python has not.
    """
    try:
        import numba
    except ValueError as error:
        threads = os.environ.get("NUMBA_NUM_THREADS")
        raise RuntimeError(f"numba cannot begin (NUMBA_NUM_THREADS is {threads}): {error}") from None

    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise RuntimeError(
            "NUMBA_DISABLE_JIT is set, and the CPU's kernels run compiled only: unset it, or call ops with "
            "impl='reference'"
        )
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


@once
def _watch_numba() -> None:
    from numba.core import event

    class Compiling(event.Listener):
        def on_start(self, _event: event.Event) -> None:
            note_compilation()
            announcement.begin()

        def on_end(self, ended: event.Event) -> None:
            announcement.end()
            kept = ended.data["dispatcher"]._cache
            if sys.exc_info()[0] and hasattr(kept, "end_turns"):  # it failed: numba will save nothing
                kept.end_turns()

    event.register("numba:compile", Compiling())


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
    if is_first_rank():
        kept = f"they go to {folder}" if folder else "they are compiled again in each process"
        warnings.warn(
            f"tritonrec: the folders for kernels compiled by {compiler} cannot be written: {kept}. Set "
            f"{variable} to a writable folder to keep them",
            RuntimeWarning,
            stacklevel=2,
        )
    return folder


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
