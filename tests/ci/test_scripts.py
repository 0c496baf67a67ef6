"""Promise: scripts of ci/ start, refuse what they do not know, import what is there. Few run in the tests."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[2] / "ci"
SCRIPTS = sorted(CI.rglob("*.py"))
STARTED = [
    path
    for path in SCRIPTS
    if re.search(r"argparse.*__main__|options_of\(.*__main__", path.read_text(), re.S)
]
STARTED.remove(CI / "ascend" / "lower.py")  # imports a Triton of its own


def names_of(tree: ast.Module) -> set[str]:
    """What the module's top level defines or imports, also under a condition."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((each.asname or each.name).split(".")[0] for each in node.names)
    return found


def missing(script: Path) -> list[str]:
    """Names that the script takes from its neighbours and that these do not have."""
    return [
        f"{node.module}.{each.name}"
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level and node.module
        for beside in [script.parent / f"{node.module}.py"]
        if beside.is_file()
        for each in node.names
        if each.name not in names_of(ast.parse(beside.read_text()))
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(CI)))
def test_what_a_script_imports_from_its_neighbours_is_there(script):
    assert not missing(script)


def test_a_name_that_is_not_there_is_found(tmp_path):
    (tmp_path / "beside.py").write_text("def one():\n    pass\n")
    script = tmp_path / "script.py"
    script.write_text("import torch\nfrom beside import one, two\nfrom torch import nothing\n")
    assert missing(script) == ["beside.two"]


@pytest.mark.parametrize("script", STARTED, ids=lambda path: str(path.relative_to(CI)))
def test_a_script_starts_and_refuses_an_option_that_it_does_not_have(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(script), "--no-such-option"])
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    before = {*sys.modules}
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        for name in {*sys.modules} - before:
            if str(CI) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]  # other folders have scripts of the same names
    assert ended.value.code == 2
