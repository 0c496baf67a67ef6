"""What `tritonrec report` does: find the files, make the sections, write the pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from ...files import atomic_write, natural_order
from ...files.places import read_document
from ...version import __version__
from ..shown import say
from . import html, markdown, sections
from .section import Section

MADE_BY = {
    "verify.json": "tritonrec verify --inject-faults --json",
    "bench.json": "tritonrec bench --json",
    "compile.json": "python ci/compile/compile_matrix.py --update",
    "lab.json": "tritonrec lab --json",
    "simulate.json": "tritonrec simulate --json",
    "traces": "tritonrec verify --trace",
}
"""By name of a file the command that writes it."""
SECTIONS: dict[str, list[Callable[[Any, str], Section]]] = {
    "verify.json": [sections.contract, sections.faults],
    "bench.json": [sections.benchmarks],
    "compile.json": [sections.compiled],
    "lab.json": [sections.lab],
    "simulate.json": [sections.simulated],
}


def checkout() -> Path | None:
    """The root of the source tree; None in an installed package."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "ci" / "baselines").is_dir() else None


def collect(folder: Path, root: Path | None) -> tuple[list[Section], list[str]]:
    """Sections, and one sentence for each file that neither `folder` nor the checkout `root` has.

    ValueError naming a file that is of another kind, or no JSON.
    """
    recorded = root / "ci" / "baselines" if root else None
    found: list[Section] = []
    missing: list[str] = []
    for name, makers in SECTIONS.items():
        path = next(
            (place / name for place in (folder, recorded) if place and (place / name).is_file()), None
        )
        if path is None:
            missing.append(_missing(name, folder))
            continue
        document, source = _load(path), _shown(path, root)
        try:
            found += [make(document, source) for make in makers]
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} is not what {MADE_BY[name]} writes: {error!r}") from error
    place = folder / "traces"
    files = sorted(place.glob("*.pftrace"), key=natural_order)
    if not files and root:
        place = root / "traces"
        files = sorted(place.glob("*.pftrace"), key=natural_order)
    if files:
        found.append(sections.traces(files, _shown(place, root)))
    else:
        missing.append(_missing("traces", folder))
    return found, missing


def _missing(name: str, folder: Path) -> str:
    return f"No {folder / name}: {MADE_BY[name]} {folder / name} writes it."


def _load(path: Path) -> Any:
    try:
        return json.loads(read_document(path, "report"))
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8
        raise ValueError(f"{path} is no JSON: {error}") from error


def _shown(path: Path, root: Path | None) -> str:
    """Relative to the checkout, where it is inside."""
    resolved = path.resolve()
    return resolved.relative_to(root).as_posix() if root and resolved.is_relative_to(root) else str(path)


def build(
    folder: Path, html_file: Path | None, markdown_file: Path | None, console: Console | None = None
) -> int:
    """Write the requested pages, print a line for each section; 0, or 1 where one did not pass.

    ValueError where `folder` and the checkout have no file at all, or a file is of another kind.
    """
    console = console or Console()
    found, missing = collect(folder, checkout())
    if not found:
        raise ValueError(f"{folder} has none of the files of a report: {', '.join(MADE_BY)}")
    for each in found:
        mark = "[green]passed[/]" if each.passed else "[red]FAILED[/]"
        console.print(f"{mark}  {each.title}: ", end="")
        say(console, f"{each.text} ({each.source})")
    for sentence in missing:
        say(console, sentence)
    for path, text in (
        (html_file, lambda: html.page(f"tritonrec {__version__}: recorded figures", found, missing)),
        (markdown_file, lambda: markdown.page(found)),
    ):
        if path:
            with atomic_write(path) as part:
                part.write_text(text(), encoding="utf-8")
            say(console, f"written: {path}")
    return 0 if all(each.passed for each in found) else 1
