"""Compiled kernels on disk: one file for each kernel, signature, processor and state of the sources.

numba's own cache numbers the files of a function, and writes the number before the file. Two processes that
compile two signatures at once take one number, and a third process runs the code of the other signature. It
also knows the time of the function's own file alone: after a change of a helper elsewhere it runs old code.
Here a file is named after all that decides its content, holds it again inside, and appears when it is whole.

Processes that want one kernel at once, ranks of a host above all, let the first of them compile it.

A wheel brings such files for `TARGETS` (`ci/compile/ahead.py` compiles them): machine code of a kind of
processor, read where the user's folder has none of this very processor.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numba
import numpy as np
from filelock import FileLock, Timeout
from numba.core.caching import FunctionCache, NullCache
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from .compilation import announced

LIBRARIES = {"numba", "llvmlite", "numpy", "torch", *sys.stdlib_module_names}
DIGITS = 16
CONSTANTS = (bool, int, float, str, bytes, tuple, np.generic, type(None))

AHEAD = Path(__file__).with_name("compiled")
"""What a wheel brings; a checkout has no such folder."""

AVX2 = {
    "avx",
    "avx2",
    "bmi",
    "bmi2",
    "cx16",
    "f16c",
    "fma",
    "lzcnt",
    "movbe",
    "popcnt",
    "sahf",
    "sse4.2",
    "xsave",
}
AVX512 = {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
TARGETS = {"x86-64-v4": AVX2 | AVX512, "x86-64-v3": AVX2}
"""LLVM's names of the processors that a wheel has kernels for, best first, with what their code needs."""

PATIENCE = 60.0
"""Seconds for which a process waits while another compiles the same kernel; then it compiles it too."""


class KernelCache(FunctionCache):
    """numba's cache of one function, with files of this module; the folder is the one that numba chooses."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._cache_file: Any = _Files(Path(self._cache_path), self._impl.filename_base, function)
        self._ahead = AheadCache(function)
        self._turns: list[FileLock] = []

    def load_overload(self, sig: object, target_context: Any) -> CompileResult | None:
        """The kernel where its file is there or comes; None where this process has to compile it."""
        ready_to_run(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)

    def _load_overload(self, sig: object, target_context: Any) -> CompileResult | None:
        found = super()._load_overload(sig, target_context)
        if found is None:
            found = self._ahead.load_overload(sig, target_context)
        if found is None and self._begin_turn(self._index_key(sig, target_context.codegen())):
            found = super()._load_overload(sig, target_context)  # of a process that had its turn before
            if found is not None:
                self.end_turns()
        return found

    def _save_overload(self, sig: object, compiled: CompileResult) -> None:
        super()._save_overload(sig, compiled)
        self.end_turns()

    def _begin_turn(self, key: object) -> bool:
        """Wait for a process that compiles the kernel now; False where that takes too long or has no way."""
        turn = FileLock(self._cache_file.path(key).with_suffix(".lock"))
        try:
            try:
                turn.acquire(blocking=False)
            except Timeout:
                with announced():
                    turn.acquire(timeout=PATIENCE)
        except (OSError, NotImplementedError):  # Timeout among them, and folders without locks
            return False
        self._turns.append(turn)
        return True

    def end_turns(self) -> None:
        """What this process compiled is kept, or could not be compiled: others need not wait."""
        for turn in self._turns:
            # A process that waits for this lock gets it, looks for the file once more, and finds the kernel.
            Path(turn.lock_file).unlink(missing_ok=True)
            turn.release()
        self._turns.clear()


class AheadCache(NullCache):
    """What the wheel brings of one function: read, never written, so that it needs no folder of its own."""

    def __init__(self, function: Callable[..., Any]):
        self._py_func = function
        base = f"{function.__module__}.{function.__qualname__}.{sys.implementation.cache_tag}"
        self._base, self._files = base, _Files(AHEAD, base, function)

    def _key(self, sig: object, codegen: Any) -> Any:
        """Types, processor and bytecode, as numba's own cache has them."""
        own: Any = self
        return FunctionCache._index_key(own, sig, codegen)

    @property
    def is_brought(self) -> bool:
        """Whether the wheel has the function as its sources are now, for any processor."""
        return self._files.has_any()

    def load_overload(self, sig: object, target_context: Any) -> CompileResult | None:
        """The kernel of the best target whose code this processor runs, or None."""
        if not AHEAD.is_dir():
            return None
        ready_to_run(target_context)
        sig, processor, code = self._key(sig, target_context.codegen())
        for target in targets_of(processor):
            data = self._files.load((sig, (processor[0], target, ""), code))
            if data is not None:
                return CompileResult._rebuild(target_context, *data)
        return None

    def write(self, sig: object, compiled: CompileResult, folder: Path) -> None:
        """Keep in `folder` what was compiled for the target that ``NUMBA_CPU_NAME`` names."""
        library, *others, _annotation, reload, environments = compiled._reduce()
        key = self._key(sig, compiled.codegen)
        # The annotation is for `inspect_types`, is large, and holds paths of the machine that compiled.
        data = (library, *others, "", reload, environments)
        _Files(folder, self._base, self._py_func).save(key, data)


def ready_to_run(target_context: Any) -> None:
    """Prepare numba for compiled code, without what a compilation needs.

    numba refreshes the whole context before it loads a kernel: some 50 modules and 250 registries of types
    and functions, a quarter of a second of every process. Only a compilation reads them, and it refreshes
    the context itself.
    """
    rtsys.initialize(target_context)  # what allocates the arrays of kernels


def targets_of(processor: tuple[str, str, str]) -> list[str]:
    """Targets whose code runs on a processor that numba describes by triple, name, features, best first."""
    _triple, name, features = processor
    there = {each[1:] for each in features.split(",") if each.startswith("+")}
    return [target for target, needed in TARGETS.items() if needed <= there or name == target]


class _Files:
    """Files ``BASE.SOURCES.KEY.nbc``: a digest of what follows it, then the key and the compiled kernel."""

    def __init__(self, folder: Path, base: str, function: Callable[..., Any]):
        self._folder, self._base, self._function = folder, base, function

    def load(self, key: object) -> Any:
        """What was saved under `key`; None where nothing was, for a damaged file, and for another user's."""
        path = self.path(key)
        try:
            if not _is_own(path.stat()):
                return None
            content = path.read_bytes()
        except OSError:
            return None
        size = hashlib.sha256().digest_size
        # Before `pickle.loads`: damaged bytes could make it do anything.
        if hashlib.sha256(content[size:]).digest() != content[:size]:
            return None
        found, data = pickle.loads(content[size:])
        return data if found == (self._sources, key) else None

    def has_any(self) -> bool:
        """Whether something was saved for today's sources."""
        return any(self._folder.glob(f"{self._base}.{self._sources[:DIGITS]}.*.nbc"))

    def save(self, key: object, data: object) -> None:
        """Keep `data`, and remove the files of other states of the sources."""
        content = dumps(((self._sources, key), data))
        path = self.path(key)
        scratch, name = tempfile.mkstemp(dir=self._folder, prefix=path.name, suffix=".tmp")
        try:
            with open(scratch, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            # Complete before it has its name: a reader never sees a part of it.
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        for other in self._folder.glob(f"{self._base}.*.nbc"):
            if not other.name.startswith(f"{self._base}.{self._sources[:DIGITS]}."):
                other.unlink(missing_ok=True)

    def flush(self) -> None:
        """Remove all files of the function."""
        for file in self._folder.glob(f"{self._base}.*.nbc"):
            file.unlink(missing_ok=True)

    @property
    def _sources(self) -> str:
        return digest_of(self._function)

    def path(self, key: object) -> Path:
        named = hashlib.sha256(repr(key).encode()).hexdigest()
        return self._folder / f"{self._base}.{self._sources[:DIGITS]}.{named[:DIGITS]}.nbc"


def _is_own(found: os.stat_result) -> bool:
    """Whether a file is this user's, root's, or the installer's of this package: its kernel is executed."""
    owners = {0, Path(__file__).stat().st_uid, os.geteuid() if hasattr(os, "geteuid") else 0}
    return stat.S_ISREG(found.st_mode) and found.st_uid in owners and not found.st_mode & stat.S_IWOTH


@cache
def digest_of(function: Callable[..., Any]) -> str:
    """A digest of all that a compiled `function` may hold: texts of files, constants, numba's version."""
    files, constants = _held_by(function)
    digest = hashlib.sha256(repr((numba.__version__, sorted(constants))).encode())
    for content in sorted(map(_digest_of_file, files)):  # in an order that no folder's name decides
        digest.update(content)
    return digest.hexdigest()


@cache
def _digest_of_file(file: str) -> bytes:
    return hashlib.sha256(Path(file).read_bytes()).digest()


def _held_by(function: Callable[..., Any]) -> tuple[set[str], set[str]]:
    """Files of a function and of the helpers that its code names, and the constants among these names."""
    files, constants = {function.__code__.co_filename}, set()
    seen, waiting = set(), [function]
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        for name, value in _named(each):
            helper = getattr(value, "py_func", getattr(value, "_defn", value))  # of a kernel, an intrinsic
            if isinstance(value, CONSTANTS):
                constants.add(f"{name} = {value!r}")
            elif isinstance(value, ModuleType):
                if not _is_library(value.__name__):
                    files.add(str(value.__file__))
            elif hasattr(helper, "__code__") and not _is_library(helper.__module__):
                files.add(helper.__code__.co_filename)
                waiting.append(helper)
    return files, constants


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _named(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The globals that a function's code names, the attributes of modules among them, and its closure."""
    code = function.__code__
    yield from zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)
    names = set(_names(code))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            yield name, value
        elif not _is_library(value.__name__):
            yield name, value
            yield from ((other, getattr(value, other)) for other in names if hasattr(value, other))


def _names(code: CodeType) -> Iterator[str]:
    """The names that code looks up, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
