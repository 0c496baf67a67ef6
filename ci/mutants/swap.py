"""A mutant in the functions of a process that has its module already: their code is replaced.

Both versions of the file are compiled, and their code objects compared one by one, in the order of the text.
Every function of the process with code that differs gets the other one. Not for edits of what runs at import:
constants, class bodies, defaults of arguments.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType


class AtImport(Exception):
    """The edit changes what an import does, or functions that cannot change places."""


def swap(path: Path, before: str, after: str) -> None:
    """Make the functions of the module at `path` those of its other text; AtImport where that cannot be.

    Without effect where the module is not imported yet. Caches of `functools` are emptied.
    """
    if all(getattr(module, "__file__", None) != str(path) for module in list(sys.modules.values())):
        return
    old, new = (compile(text, str(path), "exec", dont_inherit=True) for text in (before, after))
    if _own(old) != _own(new):
        raise AtImport(path)
    changed = dict(_changed(old, new, path))
    objects, found = gc.get_objects(), 0
    for function in [each for each in objects if type(each) is FunctionType]:
        if function.__code__.co_filename != str(path):
            continue
        if (code := changed.get(_place(function.__code__))) is not None:
            if function.__code__.co_freevars != code.co_freevars:
                raise AtImport(path)
            function.__code__ = code
            found += 1
    if not found:
        raise AtImport(path)
    for each in objects:
        if type(each) is functools._lru_cache_wrapper and (each.__module__ or "").startswith("tritonrec"):
            each.cache_clear()


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
