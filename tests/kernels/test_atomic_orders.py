"""Promise: every atomic of a Triton kernel is relaxed, and the reason why that is enough stands above it."""

import ast
from pathlib import Path

import tritonrec.kernels

FOLDER = Path(tritonrec.kernels.__file__).parent
ABOVE = 3  # lines between a reason and its atomic


def atomics():
    """(file, line, order, comments above) of every call of ``tl.atomic_*``."""
    for path in sorted(FOLDER.rglob("triton_*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr.startswith("atomic_"):
                order = {each.arg: getattr(each.value, "value", None) for each in node.keywords}.get("sem")
                above = [line.strip() for line in lines[max(0, node.lineno - 1 - ABOVE) : node.lineno - 1]]
                yield path.name, node.lineno, order, [line for line in above if line.startswith("#")]


def test_every_atomic_is_relaxed_and_says_why():
    found = list(atomics())
    assert len(found) >= 6
    for file, line, order, comments in found:
        assert order == "relaxed", f"{file}:{line}"
        assert any(each.startswith("# relaxed: ") for each in comments), f"{file}:{line} gives no reason"
