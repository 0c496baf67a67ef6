"""Errors a user can mend, and outputs that can be written, before any work is done."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import typer
from rich.console import Console

from ...files import check_writable
from ...files.places import Place, RemotePath, local_path, place_of
from ...optional import require
from ..shown import say

NEEDS = {"--trace": ("perfetto",), "--png": ("matplotlib",), "--onnx": ("onnxscript", "onnxruntime")}
"""By option the packages without which its output cannot be written."""


def checked(function):
    """Call `function`; an error a user can mend becomes one line and exit status 2."""
    from ...distributed import RankDiedError
    from ...pipeline import StageFailedError

    try:
        return function()
    except MemoryError as error:
        if os.environ.get("TRITONREC_DEBUG"):
            raise
        _say(f"out of memory: {error or 'choose smaller sizes'}")
    except (ValueError, OSError, OverflowError, RankDiedError, StageFailedError, RuntimeError) as error:
        if os.environ.get("TRITONREC_DEBUG"):
            raise
        if isinstance(error, OSError) and error.filename:
            _say(f"{error.filename}: {error.strerror}")
        else:
            _say(str(error))
    raise typer.Exit(2)


def _say(message: str) -> None:
    """Messages quote file names and compilers' output, which may look like markup."""
    console = Console(stderr=True)
    console.print("[red]error:[/] ", end="")
    say(console, message)


def require_writable(
    files: Mapping[str, Path | None] | None = None,
    folders: Mapping[str, Path | None] | None = None,
    at_urls: Collection[str] = (),
    inputs: Mapping[str, str | Path | None] | None = None,
) -> None:
    """Exit with one line and status 2 where an output could not be written at the end, by option.

    Reasons are its place, or a package that is missing. Outputs that are one file are refused too, outputs
    that would replace one of the `inputs`, and folders at a URL, but for the options `at_urls`. Called before
    any work is done; leaves nothing behind.
    """
    seen: dict[Place, str] = {}
    for option, path, folder in (
        *((option, path, False) for option, path in (files or {}).items()),
        *((option, path, True) for option, path in (folders or {}).items()),
    ):
        if path is None:
            continue

        def check(option: str = option, path: Path = path, folder: bool = folder) -> None:
            for package in NEEDS.get(option, ()):
                require(package, option)
            try:
                if folder and option not in at_urls:
                    local_path(path, f"the folder of {option}")
                check_writable(path, folder)
            except OSError as error:
                raise ValueError(f"{option}: {error.strerror}") from error
            place = place_of(path)
            for given, read in (inputs or {}).items():
                if read is not None and not folder and _is_one_file(place, place_of(read)):
                    raise ValueError(f"{option} would replace {read}, which {given} reads: name another file")
            other = seen.setdefault(place.resolve(), option)
            if other != option and (isinstance(place, RemotePath) or not place.exists() or place.is_file()):
                raise ValueError(f"{other} and {option} are both {path}: give each a place of its own")

        checked(check)


def log_of(data: str) -> str | None:
    """The path of a log that `--data` names, for the `inputs` of `require_writable`."""
    from ...data.sources import source_of

    try:
        source = source_of(data)
    except ValueError:  # reading the log raises it again
        return None
    return None if source is None else str(source.where)


def _is_one_file(left: Place, right: Place) -> bool:
    if isinstance(left, RemotePath) or isinstance(right, RemotePath):
        return left == right
    return left.is_file() and right.is_file() and left.samefile(right)
