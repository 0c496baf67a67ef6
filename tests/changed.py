"""Tests of tools that a change leaves as they are: nothing that they or the tool import has changed.

A tool stands around the core, which imports none of them (`test_layers.py`). Imports are read as they are
written, in functions, for types and in programs within strings too; nothing is imported for it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = "tritonrec"
HARNESS = f"{PACKAGE}/harness"
TOOLS = {
    "emulator": ([f"{HARNESS}/emulator"], ["tests/emulator/*.py"]),
    "simulator and lab": (
        [f"{HARNESS}/simulator", f"{HARNESS}/lab"],
        ["tests/harness/test_simulator*.py", "tests/harness/test_lab*.py"],
    ),
    "serving": ([f"{PACKAGE}/serving", f"{HARNESS}/serve"], ["tests/serving/*.py"]),
    "slipstream": ([f"{PACKAGE}/slipstream", f"{HARNESS}/slipstream"], ["tests/slipstream/*.py"]),
    "resilience": ([f"{PACKAGE}/resilience"], ["tests/resilience/*.py"]),
    "capacity": ([f"{PACKAGE}/capacity"], ["tests/capacity/*.py"]),
    "dcp": ([f"{PACKAGE}/dcp"], ["tests/checkpoint/test_dcp.py"]),
    "metrics": ([f"{PACKAGE}/metrics"], ["tests/metrics/*.py", "tests/harness/test_train_metrics.py"]),
    "torchrec": ([f"{PACKAGE}/torchrec"], ["tests/torchrec_names/*.py"]),
}
"""Name -> folders of its code, and its files of tests."""
FOR_ALL = {
    "tests/conftest.py", "tests/changed.py", "tests/interpreter.py", f"{PACKAGE}/__init__.py",
    f"{HARNESS}/pytest_plugin.py", f"{HARNESS}/emulator/plugin.py",
}  # fmt: skip
"""What every test has; a change of a file that is neither Python nor a page counts for all of them too."""
BY_NAMES = f"{PACKAGE}/kernels/"
"""Modules of a folder below find each other by names made at run time: one of them stands for all."""


def changed_files(root: Path, reference: str) -> set[str]:
    """Paths that differ from a commit: committed since, uncommitted, and untracked."""

    def git(*words: str) -> set[str]:
        done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
        return {line for line in done.stdout.split("\0") if line}

    since = git("diff", "--name-only", "--no-renames", "--relative", "-z", reference, "--")
    return since | git("ls-files", "--others", "--exclude-standard", "-z")


class Sources:
    """Files of Python below `root`, and which others each of them imports."""

    def __init__(self, root: Path):
        self.root = root
        found = (path for name in (PACKAGE, "tests", "ci") for path in (root / name).rglob("*.py"))
        self.files = {path.relative_to(root).as_posix() for path in found}
        self.stems, self.folders = defaultdict(set), defaultdict(set)
        for file in self.files:
            if not file.startswith(f"{PACKAGE}/"):
                self.stems[Path(file).stem].add(file)
            self.folders[file.rpartition("/")[0]].add(file)
        self.commands = {Path(file).stem: file for file in self.folders[f"{HARNESS}/cli"]}
        self._imports: dict[str, set[str]] = {}
        top = root / PACKAGE / "__init__.py"
        self.lazy = {
            alias.asname or alias.name: ".".join(filter(None, (PACKAGE, node.module)))
            for node in (ast.walk(ast.parse(top.read_text())) if top.exists() else ())
            if isinstance(node, ast.ImportFrom) and node.level == 1
            for alias in node.names
            if node.module
        }

    def closure(self, files: Iterable[str]) -> set[str]:
        """`files` and all that they import, directly or not."""
        found, left = set(), [*files]
        while left:
            file = left.pop()
            if file not in found:
                found.add(file)
                left.extend(self.imports(file))
        return found

    def imports(self, file: str) -> set[str]:
        if file not in self._imports:
            found = {each for name in self.names(file) for each in self.named(name)}
            if file.startswith(BY_NAMES):
                found |= self.folders[file.rpartition("/")[0]]
            if file == f"{PACKAGE}/__init__.py":  # imports a package when a name of it is used
                found = set()
            self._imports[file] = found
        return self._imports[file]

    def names(self, file: str) -> Iterator[str]:
        """Dotted names, and paths that end in `.py`, of what a file may import or run."""
        parts = file.removesuffix(".py").split("/")
        nodes = list(ast.walk(ast.parse((self.root / file).read_text())))
        texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        if file.startswith(
            f"{PACKAGE}/"
        ):  # strings of the library are messages, and name no module to import
            texts |= {id(node) for node in nodes if isinstance(node, ast.Constant)}
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = parts[: len(parts) - node.level] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == PACKAGE:
                    yield f"{PACKAGE}.{node.attr}"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
                yield from re.findall(rf"\b{PACKAGE}(?:\.\w+)+|\w+\.py\b", node.value)
                for base, names in re.findall(r"\bfrom ([\w.]+) import (\w+(?:, *\w+)*)", node.value):
                    yield from (f"{base}.{name.strip()}" for name in names.split(","))
                yield from re.findall(r"\bimport (\w+)", node.value)
                words = re.findall(rf"\b{PACKAGE} ([\w-]+)", node.value)
                for word in (node.value, *words):
                    if (command := word.replace("-", "_")) in self.commands:
                        yield f"{PACKAGE}.harness.cli.{command}"

    def named(self, name: str) -> set[str]:
        """Files of a dotted name and of the packages around it, or those of tests and ci with its stem."""
        if name.endswith(".py"):
            return {file for file in self.stems[name[:-3]] if file.endswith(f"/{name}")}
        first, *rest = name.split(".")
        if first != PACKAGE:
            return self.stems[first] | (self.stems[rest[-1]] if first in ("ci", "tests") and rest else set())
        if rest and rest[0] in self.lazy and not self._module([PACKAGE, rest[0]]):
            return self.named(self.lazy[rest[0]])
        return {file for end in range(1, len(rest) + 2) for file in self._module([PACKAGE, *rest[: end - 1]])}

    def _module(self, parts: list[str]) -> set[str]:
        path = "/".join(parts)
        return {f"{path}.py", f"{path}/__init__.py"} & self.files

    def mentions(self, files: Iterable[str], name: str) -> bool:
        return any(name in (self.root / file).read_text() for file in files)


def concerned(
    root: Path, changed: set[str], files: Iterable[str], sources: Sources | None = None
) -> set[str]:
    """Those of `files` of tests that a changed file concerns; `sources` as in `left_out`."""
    if (python := _python(root, changed)) is None:
        return set(files)
    pages = {Path(file).name for file in changed if file.endswith(".md")}
    sources = sources or Sources(root)
    return {
        file
        for file in files
        if python & sources.closure([file, *around(file, sources)])
        or any(sources.mentions([file], page) for page in pages)
    }


def left_out(root: Path, changed: set[str], sources: Sources | None = None) -> dict[str, list[str]]:
    """Tool -> its files of tests, of every tool that no changed file concerns.

    `sources` of `root` that have been read before are not read again.
    """
    if (python := _python(root, changed)) is None:
        return {}
    pages = {file for file in changed if file.endswith(".md")}
    sources, found = sources or Sources(root), {}
    for tool, (folders, patterns) in TOOLS.items():
        tests = {path.relative_to(root).as_posix() for each in patterns for path in root.glob(each)}
        code = {file for file in sources.files if file.startswith(tuple(f"{each}/" for each in folders))}
        beside = {each for file in tests for each in around(file, sources)}
        if python & sources.closure(tests | code | beside):
            continue
        if any(sources.mentions(tests, Path(page).name) for page in pages):
            continue
        found[tool] = sorted(file for file in tests if Path(file).name.startswith("test_"))
    return found


def around(file: str, sources: Sources) -> set[str]:
    """The fixtures that a file of tests has."""
    return {f"{file.rpartition('/')[0]}/conftest.py", "tests/conftest.py"} & sources.files


def _python(root: Path, changed: set[str]) -> set[str] | None:
    """Changed files of Python; None where a change may concern anyone: what has gone, and what is no page."""
    here = {file for file in changed if (root / file).exists()}
    python = {file for file in here if file.endswith(".py")}
    pages = {file for file in here if file.endswith(".md")}
    return None if changed - pages - python or python & FOR_ALL else python
