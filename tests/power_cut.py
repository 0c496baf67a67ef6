"""What a power cut could leave: names and contents that no flush has brought to the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


class Disk:
    """Watches calls of `os` in a folder, and asserts that no order of writes to the disk breaks a promise.

    A file gets its name when its content is on the disk; what `is_commit` makes all files before it count,
    so their names are there first; and a file goes when the commits that named it are gone.
    """

    def __init__(self, monkeypatch: Any, folder: Path, is_commit: Callable[[Path], bool]):
        self._folder, self._is_commit, self._flushed = folder, is_commit, set[Path]()
        self.named, self._gone = set[Path](), set[Path]()  # not on the disk for certain
        self.commits = 0
        for name in ("fsync", "replace", "unlink"):
            monkeypatch.setattr(os, name, partial(self._call, getattr(self, f"_{name}"), getattr(os, name)))

    def _call(self, note: Callable[..., None], call: Callable[..., Any], *given: Any, **more: Any) -> Any:
        if name_of(given[0]).is_relative_to(self._folder):
            note(*map(name_of, given))
        return call(*given, **more)

    def _fsync(self, path: Path) -> None:
        self._flushed.add(path)
        self.named = {each for each in self.named if each.parent != path}
        self._gone = {each for each in self._gone if each.parent != path}

    def _replace(self, source: Path, target: Path) -> None:
        assert source in self._flushed, f"{target} could be empty"
        if self._is_commit(target):
            assert not self.named, f"{target} could be there without {self.named}"
            self.commits += 1
        self.named.add(target)

    def _unlink(self, path: Path) -> None:
        if self._is_commit(path):
            self._gone.add(path)
        elif not path.name.startswith("."):
            assert not self._gone, f"{self._gone} could come back without {path}"


def name_of(place: int | str | Path) -> Path:
    """That of a path, or of an open file."""
    return Path(f"/proc/self/fd/{place}").resolve() if isinstance(place, int) else Path(place)
