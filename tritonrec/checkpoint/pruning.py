"""Removal of old checkpoints and unused files."""

from __future__ import annotations

import re
from pathlib import Path

from ..files.places import Place
from .files import NUM_KEPT, PARTIAL, CheckpointError, flush, manifest_of, names_in, steps
from .manifest import CONTENT, files_of, read_manifest

_FOLDER = re.compile(r"step-\d{12}")


def prune(directory: Place, kept: int | None = NUM_KEPT) -> None:
    """Remove all but the last `kept` checkpoints (None: keep all), and files that these do not name.

    A manifest that cannot be read may be of a newer tritonrec: then only partial files are removed. Links are
    removed, never followed: no file outside of `directory` is removed, and a linked folder stays unchanged
    while a checkpoint needs it.
    """
    saved = steps(directory)
    dropped = saved[:-kept] if kept else []
    # Manifests first, then files: a reader in between finds no manifest, and never one without its files.
    for step in dropped:
        manifest_of(directory, step).unlink()
    if dropped:
        flush(directory)  # or a power cut could bring back a manifest without its files
    named: set[str] = set()
    unreadable = False
    for step in steps(directory):
        try:
            named |= {entry["file"] for entry in files_of(read_manifest(manifest_of(directory, step)))}
        except CheckpointError:
            unreadable = True
    needed = {file.partition("/")[0] for file in named}
    for name in names_in(directory):
        folder = directory / name
        if name.startswith(PARTIAL):
            folder.unlink()
        if not _FOLDER.fullmatch(name):
            continue
        if isinstance(folder, Path) and folder.is_symlink():
            if name not in needed and not unreadable:
                folder.unlink()
            continue
        for file in (f"{name}/{child}" for child in names_in(folder)):
            stale = CONTENT.fullmatch(file) and file not in named and not unreadable
            if stale or file.startswith(f"{name}/{PARTIAL}"):
                (directory / file).unlink()
        if not names_in(folder):
            folder.rmdir()
