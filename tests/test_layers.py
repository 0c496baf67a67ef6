"""Imports flow one way: tools -> pipeline -> {embedding, distributed, data, trace} -> ops -> kernels.

The tools are `TOOLS`; what trains imports none of them. Of the four in braces `embedding` imports
`distributed` and `data`, and `distributed` imports `trace`.

Anyone may import `files`, `host_memory`, `optional`, `room`, `settings` and `version`, which import nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

PACKAGE = Path(__file__).resolve().parent.parent / "tritonrec"

# The packages that each package may import from, besides itself.
BELOW_PIPELINE = {"embedding", "distributed", "data", "trace", "nn", "checkpoint"}
FOR_ALL = ("files", "host_memory", "optional", "room", "settings", "version")
MAY_IMPORT = {
    "files": set(),
    "settings": set(),
    "optional": set(),
    "room": set(),
    "host_memory": set(),
    "version": set(),
    "kernels": set(),
    "ops": {"kernels"},
    "nn": {"ops", "kernels"},
    "trace": {"ops", "kernels"},
    "data": {"ops", "kernels"},
    "distributed": {"ops", "kernels", "trace"},
    "embedding": {"ops", "kernels", "distributed", "data"},
    "checkpoint": {"ops", "kernels"},
    "loggers": set(),
    "telemetry": set(),
    "callbacks": {"distributed"},
    "serving": {"ops", "kernels", "pipeline", *BELOW_PIPELINE},
    "pipeline": {"ops", "kernels", *BELOW_PIPELINE},
    "dcp": {"checkpoint", "kernels", "pipeline"},
    "slipstream": {"ops", "kernels", "data", "distributed", "embedding", "pipeline"},
    "resilience": {"ops", "kernels", "data", "distributed", "embedding", "checkpoint", "pipeline"},
    "torchrec": {"ops", "data", "embedding"},
    "capacity": {"data", "embedding", "pipeline"},
    "metrics": {"data", "distributed", "nn"},
    "harness": {
        "ops",
        "kernels",
        "pipeline",
        "slipstream",
        "resilience",
        "torchrec",
        "capacity",
        "metrics",
        "serving",
        "callbacks",
        "loggers",
        *BELOW_PIPELINE,
    },
    "__main__": {"harness"},
}

TOOLS = {
    "harness",
    "capacity",
    "dcp",
    "metrics",
    "resilience",
    "serving",
    "slipstream",
    "torchrec",
    "__main__",
}


def package_of(module: str) -> str | None:
    """The package of a dotted name: ``data`` of ``tritonrec.data.batch``; None outside of ``tritonrec``."""
    first, _, rest = module.partition(".")
    return (rest.partition(".")[0] or "") if first == "tritonrec" else None


@cache
def import_nodes(source: str) -> list[ast.Import | ast.ImportFrom]:
    """In functions and for types too."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(source: str, package: str) -> Iterator[tuple[int, str, list[str]]]:
    """(line, absolute dotted name, names taken from it) of every import in a module of `package`."""
    for node in import_nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names)
        else:
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield node.lineno, module, [f"{module}.{alias.name}" for alias in node.names]


def imported_modules(source: str, package: str) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import in a module of `package`."""
    # `from tritonrec import ops` and `from .. import ops` name a package by the name they import.
    return [
        (line, name)
        for line, module, taken in imports(source, package)
        for name in (taken if taken and module == "tritonrec" else [module])
    ]


def upward_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports in `module` that its layer may not make."""
    layer = package_of(module)
    package = module if is_package else module.rpartition(".")[0]
    if layer == "":
        return []
    wrong = []
    for line, name in imported_modules(source, package):
        target = package_of(name)
        if target is None or target in (*FOR_ALL, layer, *MAY_IMPORT[layer]):
            continue
        wrong.append(f"{module}, line {line}: {layer} imports {name}")
    return wrong


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("tritonrec", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package


def test_no_import_goes_up():
    wrong = [
        found
        for path, module, is_package in modules()
        for found in upward_imports(path.read_text(), module, is_package)
    ]
    assert not wrong, "\n".join(wrong)


def all_imports(source: str, package: str, names: set[str]) -> set[str]:
    """Modules out of `names` that a module of `package` imports."""
    found = set()
    for _line, module, taken in imports(source, package):
        found |= ({*taken} & names) or {module}
    return found & names


@cache
def graph() -> dict[str, set[str]]:
    """What each module imports, also in functions and for types."""
    names = {module for _path, module, _ in modules()}
    return {
        module: all_imports(path.read_text(), module if is_package else module.rpartition(".")[0], names)
        - {module}
        for path, module, is_package in modules()
    }


def test_no_import_circle_also_not_by_annotation_or_deferral():
    TopologicalSorter(graph()).prepare()  # CycleError names the modules of a circle


VERIFY = "tritonrec.harness.verify"


def test_the_core_of_verify_reaches_no_tool():
    """It loads `verify/tools` by name, when a case or a fault of theirs is wanted."""
    tools = f"{VERIFY}.tools"
    core = {name for name in graph() if name.startswith(VERIFY) and not name.startswith(tools)}
    assert f"{VERIFY}.run_case" in core
    reached = core
    while more := set().union(*map(graph().get, reached)) - reached:
        reached = reached | more
    wrong = {name for name in reached if name.startswith(tools) or package_of(name) in TOOLS - {"harness"}}
    assert not wrong, sorted(
        f"{module} imports {name}" for module in reached - wrong for name in graph()[module] & wrong
    )


def test_what_trains_imports_no_tool():
    core = {package for package in MAY_IMPORT if package not in TOOLS}
    assert not {(package, tool) for package in core for tool in MAY_IMPORT[package] & TOOLS}


def test_every_package_has_a_rule():
    packages = {
        path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()
    }
    assert packages - {"__init__", "__pycache__", "py.typed"} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from tritonrec.pipeline import Trainer", "tritonrec.data.loader"),
        ("from ..pipeline import Trainer", "tritonrec.data.loader"),
        ("from .. import harness", "tritonrec.pipeline.trainer"),
        ("from tritonrec import ops", "tritonrec.kernels.unique.op"),
        ("from ... import ops", "tritonrec.kernels.unique.op"),
        ("import tritonrec.kernels.unique", "tritonrec.callbacks"),
        ("if TYPE_CHECKING:\n    from ..data import JaggedBatch", "tritonrec.nn.layer"),
        ("def late():\n    from ..trace import read", "tritonrec.embedding.table"),
    ],
)
def test_an_upward_import_is_seen(source, module):
    assert len(upward_imports(source, module)) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from .. import ops", "tritonrec.nn.layer"),
        ("from ..version import __version__", "tritonrec.harness.doctor"),
        ("from .batch import JaggedBatch\nimport torch", "tritonrec.data.loader"),
        ("from tritonrec.kernels.dispatch import Impl", "tritonrec.kernels.unique.op"),
        ("from ..trace import Recorder", "tritonrec.pipeline.trainer"),
    ],
)
def test_a_downward_import_passes(source, module):
    assert upward_imports(source, module) == []


@pytest.mark.parametrize("package", ["kernels", "harness"])
def test_links_at_the_top_lead_into_the_package(package):
    link = PACKAGE.parent / package
    assert link.is_symlink()
    assert link.resolve() == PACKAGE / package
