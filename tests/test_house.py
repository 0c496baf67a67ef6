"""Imports flow one way: harness -> pipeline -> {embedding, distributed, data, trace} -> ops -> kernels.

Anyone may import `files`, which imports nothing.
"""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tritonrec"

# Which rooms of the package a room may import from, besides itself.
BELOW_PIPELINE = {"embedding", "distributed", "data", "trace", "nn", "checkpoint"}
MAY_IMPORT = {
    "files": set(),
    "kernels": set(),
    "ops": {"kernels"},
    "nn": {"ops", "kernels"},
    "trace": {"ops", "kernels"},
    "data": {"ops", "kernels"},
    "distributed": {"ops", "trace"},
    "embedding": {"ops", "kernels"},
    "checkpoint": {"ops", "kernels"},
    "serving": {"ops", "kernels", "nn", "distributed"},
    "pipeline": {"ops", "kernels", *BELOW_PIPELINE},
    "slipstream": {"ops", "kernels", "data", "distributed", "embedding", "pipeline"},
    "harness": {"ops", "kernels", "pipeline", "slipstream", "serving", *BELOW_PIPELINE},
    "__main__": {"harness"},
}


def room_of(module: str) -> str | None:
    """The room of a dotted name: ``tritonrec.data.batch`` is in ``data``; None outside the package."""
    first, _, rest = module.partition(".")
    return (rest.partition(".")[0] or "") if first == "tritonrec" else None


def imported_modules(source: str, package: str) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import in a module of `package`, in functions and for types."""
    found = []
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from tritonrec import ops` and `from .. import ops` name a room by what they take.
            taken = [f"{module}.{alias.name}" for alias in node.names] if module == "tritonrec" else [module]
            found += [(node.lineno, name) for name in taken]
    return found


def wrong_arrows(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports in `module` that its room may not make."""
    room = room_of(module)
    package = module if is_package else module.rpartition(".")[0]
    if room in ("", "__version__"):
        return []
    wrong = []
    for line, name in imported_modules(source, package):
        target = room_of(name)
        if target is None or target in ("__version__", "files", room, *MAY_IMPORT[room]):
            continue
        wrong.append(f"{module}, line {line}: {room} imports {name}")
    return wrong


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("tritonrec", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package


def test_no_arrow_runs_back_up():
    wrong = [
        arrow
        for path, module, is_package in modules()
        for arrow in wrong_arrows(path.read_text(), module, is_package)
    ]
    assert not wrong, "\n".join(wrong)


KNOWN_CIRCLES = {
    ("tritonrec.kernels.rows", "tritonrec.kernels.rows"),
    ("tritonrec.trace.writer", "tritonrec.trace.recorder"),
}
"""(module, imported module): one import of each circle that is left."""


def all_imports(source: str, package: str, names: set[str]) -> set[str]:
    """Modules out of `names` that a module of `package` imports, for annotations and in functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            taken = {f"{module}.{alias.name}" for alias in node.names}
            found |= (taken & names) or {module}
    return found & names


def test_no_import_circle_also_not_by_annotation_or_deferral():
    names = {module for _path, module, _ in modules()}
    graph = {
        module: all_imports(path.read_text(), module if is_package else module.rpartition(".")[0], names)
        for path, module, is_package in modules()
    }
    for module, imported in KNOWN_CIRCLES:
        graph[module].discard(imported)
    for module in graph:
        graph[module].discard(module)
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle


def test_every_room_has_a_rule():
    rooms = {
        path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()
    }
    assert rooms - {"__init__", "__pycache__", "py.typed"} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from tritonrec.pipeline import Trainer", "tritonrec.data.loader"),
        ("from ..pipeline import Trainer", "tritonrec.data.loader"),
        ("from .. import harness", "tritonrec.pipeline.trainer"),
        ("from tritonrec import ops", "tritonrec.kernels.unique.reference"),
        ("from ... import ops", "tritonrec.kernels.unique.reference"),
        ("import tritonrec.kernels.unique", "tritonrec.distributed.groups"),
        ("if TYPE_CHECKING:\n    from ..data import JaggedBatch", "tritonrec.nn.layer"),
        ("def late():\n    from ..trace import read", "tritonrec.embedding.table"),
    ],
)
def test_an_upward_arrow_is_seen(source, module):
    assert len(wrong_arrows(source, module)) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from .. import ops", "tritonrec.nn.layer"),
        ("from .. import __version__", "tritonrec.harness.verify"),
        ("from .batch import JaggedBatch\nimport torch", "tritonrec.data.loader"),
        ("from tritonrec.kernels.dispatch import Impl", "tritonrec.kernels.unique.reference"),
        ("from ..trace import Recorder", "tritonrec.pipeline.trainer"),
    ],
)
def test_a_downward_arrow_passes(source, module):
    assert wrong_arrows(source, module) == []


@pytest.mark.parametrize("room", ["kernels", "harness"])
def test_links_at_the_top_lead_into_the_package(room):
    link = PACKAGE.parent / room
    assert link.is_symlink()
    assert link.resolve() == PACKAGE / room
