"""Compiled kernels on disk: one file for each kernel, signature, processor and state of the sources.

numba's own cache numbers the files of a function, and writes the number before the file. Two processes that
compile two signatures at once take one number, and a third process runs the code of the other signature. It
also knows the time of the function's own file alone: after a change of a helper elsewhere it runs old code.
Here a file is named after all that decides its content, holds it again inside, and appears when it is whole.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numba
import numpy as np
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

LIBRARIES = {"numba", "llvmlite", "numpy", "torch", *sys.stdlib_module_names}
DIGITS = 16
CONSTANTS = (bool, int, float, str, bytes, tuple, np.generic, type(None))


class KernelCache(FunctionCache):
    """numba's cache of one function, with files of this module; the folder is the one that numba chooses."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._cache_file: Any = _Files(Path(self._cache_path), self._impl.filename_base, function)


class _Files:
    """Files ``BASE.SOURCES.KEY.nbc``: a digest of what follows it, then the key and the compiled kernel."""

    def __init__(self, folder: Path, base: str, function: Callable[..., Any]):
        self._folder, self._base, self._function = folder, base, function

    def load(self, key: object) -> object | None:
        """What was saved under `key`; None where nothing was, and for a file that is damaged."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        size = hashlib.sha256().digest_size
        if hashlib.sha256(content[size:]).digest() != content[:size]:
            return None
        found, data = pickle.loads(content[size:])
        return data if found == (self._sources, key) else None

    def save(self, key: object, data: object) -> None:
        """Keep `data`, and remove the files of other states of the sources."""
        content = dumps(((self._sources, key), data))
        path = self._path(key)
        scratch, name = tempfile.mkstemp(dir=self._folder, prefix=path.name, suffix=".tmp")
        try:
            with open(scratch, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
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

    def _path(self, key: object) -> Path:
        named = hashlib.sha256(repr(key).encode()).hexdigest()
        return self._folder / f"{self._base}.{self._sources[:DIGITS]}.{named[:DIGITS]}.nbc"


@cache
def digest_of(function: Callable[..., Any]) -> str:
    """A digest of all that a compiled `function` may hold: texts of files, constants, numba's version."""
    files, constants = _held_by(function)
    digest = hashlib.sha256(repr((numba.__version__, sorted(constants))).encode())
    for file in sorted(files):
        digest.update(_digest_of_file(file))
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
