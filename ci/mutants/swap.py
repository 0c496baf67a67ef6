"""A mutant in the functions of a process that has its module already: their code is replaced.

Both versions of the file are compiled, and their code objects compared one by one, in the order of the text.
Every function of the process with code that differs gets the other one, and numba forgets what it has
compiled of it and of its callers. Not for edits of what runs at import: constants, class bodies, defaults of
arguments.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher


class AtImport(Exception):
    """The edit changes what an import does, or functions that cannot change places."""


class Found:
    """The functions of this process by their file, caches of `functools` in our modules, and kernels."""

    def __init__(self) -> None:
        self.functions: dict[str, list[FunctionType]] = defaultdict(list)
        self.caches = []
        for each in gc.get_objects():
            if type(each) is FunctionType:
                self.functions[each.__code__.co_filename].append(each)
            elif type(each) is functools._lru_cache_wrapper and "tritonrec" in (each.__module__ or ""):
                self.caches.append(each)
        modules = [getattr(each, "__dict__", {}) for each in list(sys.modules.values())]
        self.kernels = {each for names in modules for each in list(names.values()) if is_kernel(each)}


def swap(path: Path, before: str, after: str, there: Found | None = None) -> None:
    """Make the functions of the module at `path` those of its other text; AtImport where that cannot be.

    Without effect where the module is not imported yet. Caches of `functools` are emptied. `there` is what
    the process has, if that is known.
    """
    if all(getattr(module, "__file__", None) != str(path) for module in list(sys.modules.values())):
        return
    old, new = (compile(text, str(path), "exec", dont_inherit=True) for text in (before, after))
    if _own(old) != _own(new):
        raise AtImport(path)
    changed = dict(_changed(old, new, path))
    there, found = there or Found(), set()
    for function in there.functions[str(path)]:
        if (code := changed.get(_place(function.__code__))) is not None:
            if function.__code__.co_freevars != code.co_freevars:
                raise AtImport(path)
            function.__code__ = code
            found.add(function)
    if not found:
        raise AtImport(path)
    for cache in there.caches:
        cache.cache_clear()
    _forget(found, there.kernels)


def is_kernel(each: object) -> bool:
    """Whether numba has made it of a function."""
    return issubclass(type(each), Dispatcher)


def _forget(functions: set[FunctionType], kernels: set[Dispatcher]) -> None:
    """Make numba compile `functions` again, and all kernels that call them."""
    stale, more = set(), {each for each in kernels if each.py_func in functions}
    while more:
        stale |= more
        more = {each for each in kernels if stale & _called(each)} - stale
    for each in stale:
        each._make_finalizer()()
        each._reset_overloads()
        each._cache = NullCache()


def _called(kernel: Dispatcher) -> set[Dispatcher]:
    variables = inspect.getclosurevars(kernel.py_func)
    named = [*variables.globals.values(), *variables.nonlocals.values()]
    return {each for each in named if is_kernel(each)}


def _changed(old: CodeType, new: CodeType, path: Path) -> Iterator[tuple[tuple, CodeType]]:
    """The place of each code object of `old` with a difference in it, or inside, and the one of `new`."""
    ours, theirs = _inner(old), _inner(new)
    if [each.co_name for each in ours] != [each.co_name for each in theirs]:
        return  # `old` itself has changed, and all inside with it
    for left, right in zip(ours, theirs, strict=True):
        if _deep(left) != _deep(right):
            if _is_class(left) and _own(left) != _own(right):
                raise AtImport(path)
            yield _place(left), right
            yield from _changed(left, right, path)


def _place(code: CodeType) -> tuple:
    return code.co_qualname, code.co_firstlineno, repr(_deep(code))


def _inner(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _own(code: CodeType) -> tuple:
    """What a code object does, but for those in it."""
    constants = [repr(each) for each in code.co_consts if not isinstance(each, CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars


def _deep(code: CodeType) -> tuple:
    return _own(code), [_deep(each) for each in _inner(code)]


def _is_class(code: CodeType) -> bool:
    return "__module__" in code.co_names and "__qualname__" in code.co_names
