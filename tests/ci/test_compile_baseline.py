"""Promise: each Triton kernel was compiled for every target; an interpreter takes what no compiler does."""

import ast
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "tritonrec" / "kernels"


def launched(source: str) -> list[str]:
    """Functions that Triton compiles and whose names end in ``_kernel``: those that Python launches."""
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        if {"triton.jit", "jit_kernel", "jit_for_any_alignment"} & {*map(ast.unparse, node.decorator_list)}
    ]


def folder_of(path: Path) -> str:
    """The op's folder, or the file without its prefix where several ops share it."""
    return path.stem.removeprefix("triton_") if path.parent == KERNELS else path.parent.name


def test_every_kernel_is_compiled():
    rows = json.loads((ROOT / "ci" / "baselines" / "compile.json").read_text())["kernels"]
    compiled = {
        name.split()[0] for name, targets in rows.items() if all("code" in row for row in targets.values())
    }
    found = {
        f"{folder_of(path)}.{name.lstrip('_')}"
        for path in KERNELS.rglob("*.py")
        for name in launched(path.read_text())
    }
    assert len(found) > 40
    assert found - compiled == set()  # add a case to ci/compile/launches.py, and `compile_matrix.py --update`
