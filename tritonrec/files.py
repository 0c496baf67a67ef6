"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield where to write: a name beside `path`, in a folder made for it, that becomes `path` at the end.

    After an error what was there before is there still. What is no regular file, such as ``/dev/stdout`` or a
    pipe, is written to itself. Nothing is flushed to the disk: a process may end at any time, not the power.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not target.is_file():
        yield target
        return
    target = target.resolve()  # a link goes on leading where it led
    part = target.with_name(f"{target.name}.part")
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def save_json(document: Any, path: str | os.PathLike[str]) -> None:
    """Write `document` as indented JSON, whole or not at all."""
    text = json.dumps(document, indent=2) + "\n"
    with whole(path) as part:
        part.write_text(text)
