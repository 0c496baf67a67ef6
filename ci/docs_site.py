"""Hooks of mkdocs: files outside docs/ that its pages link to become part of the site, under source/.

A link is written as it works in the repository (`../ci/baselines/lab.json`). Here it is rewritten to where
the file is in the site, and the file is added. A link to a folder leads to its README.md. Pages among those
files (README.md, CONTRIBUTING.md) have their links rewritten in the same way.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """Relative targets of a page's links, without anchors; none of its code blocks."""
    found = (match[2] for match in LINK.finditer(FENCE.sub("", text)))
    return [target for target in found if "://" not in target and not target.startswith("mailto:")]


def target_of(page: str, link: str) -> str:
    """Path in the repository that `link` on `page`, a path there, leads to."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def place(path: str) -> str:
    """Where a file of the repository is in the site's sources."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def linked() -> list[str]:
    """Files outside docs/ that its pages link to, and that those pages link to."""
    pages = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
    found: list[str] = []
    while pages:
        page = pages.pop()
        for link in links((ROOT / page).read_text(encoding="utf-8")):
            path = target_of(page, link)
            if not path.startswith("docs/") and path not in found and (ROOT / path).is_file():
                found.append(path)
                if path.endswith(".md"):
                    pages.append(path)
    return sorted(found)


def rewritten(page: str, text: str) -> str:
    """The text of `page` with links as they are in the site."""

    here = posixpath.dirname(place(page)) or "."
    return with_links(text, lambda link: posixpath.relpath(place(target_of(page, link)), here))


def with_links(text: str, there: Callable[[str], str]) -> str:
    """A page whose relative links outside of code blocks lead `there`."""

    def rewrite(match: re.Match[str]) -> str:
        if "://" in match[2] or match[2].startswith("mailto:"):
            return match[0]
        return f"{match[1]}{there(match[2])}{match[3]}"

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(rewrite, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(rewrite, text[end:])])


def on_files(files, config):
    """Add the linked files."""
    from mkdocs.structure.files import File, InclusionLevel

    for path in linked():
        file = File.generated(config, place(path), abs_src_path=str(ROOT / path))
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite the links."""
    uri = page.file.src_uri
    return rewritten(uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}", markdown)
