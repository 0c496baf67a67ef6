"""Promise: mutants of host code are other programs, and their tests are chosen by their line."""

import ast
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci" / "mutants"))

from chosen import chosen_files  # noqa: E402 (its folder is no package)
from edits import is_one, mutants_of  # noqa: E402
from run import CoverageMap  # noqa: E402

SOURCE = '''
"""A module."""
from numba import njit

LIMIT: int = 3

@njit(cache=True)
def compiled(a):
    return a + 1

def plain(a, b=2, *, ä="ö"):
    """Of 1 and 2."""
    if a < b and not a:
        raise ValueError(f"{a + 1} is below {b}")
    a[0] = max(a, b)
    a.sort()
    return "x" + a if a is None else (a - b) * 2
'''


@pytest.fixture
def edits(tmp_path):
    Path(tmp_path, "module.py").write_text(SOURCE)
    return [each for each in mutants_of(tmp_path, "module.py") if is_one(each, SOURCE)]


def test_every_mutant_is_another_program_with_a_name_of_its_own(edits):
    programs = {ast.dump(ast.parse(each.applied(SOURCE))) for each in edits}
    assert len(programs) == len(edits) == len({each.name for each in edits})
    assert ast.dump(ast.parse(SOURCE)) not in programs


def test_operators_constants_conditions_and_statements_are_edited(edits):
    made = {(each.operator, each.before, each.after) for each in edits}
    assert {
        ("compare", "<", "<="), ("compare", "<", ">="), ("compare", "is", "is not"), ("boolean", "and", "or"),
        ("condition", "a < b and not a", "True"), ("negation", "not a", "(a)"), ("swap", "a, b", "b, a"),
        ("constant", "3", "4"), ("constant", "2", "3"), ("arithmetic", "-", "+"), ("arithmetic", "*", "+"),
        ("statement", "a[0] = max(a, b)", "pass"), ("statement", "a.sort()", "pass"),
    } <= made  # fmt: skip


def test_what_only_speaks_or_is_compiled_is_left_alone(edits):
    lines = SOURCE.splitlines()
    touched = {lines[each.line - 1].strip() for each in edits}
    assert not {line for line in touched if line.startswith(("raise", '"""', "return a + 1", "@", "from"))}


def test_the_packages_have_thousands_of_mutants_and_none_sends_signals():
    files = chosen_files(ROOT)
    assert len(files) > 100 and not any(file.endswith("rank_process.py") for file in files)
    assert len(mutants_of(ROOT, "tritonrec/pipeline/dist_plan.py")) > 50


def test_tests_of_a_line_are_chosen_one_file_after_the_other_fastest_first(tmp_path, edits):
    tests = [["a::slow", 5.0], ["a::fast", 0.1], ["a::other", 0.2], ["b::only", 1.0], ["c", 9.0]]
    line = edits[0].line
    document = {"tests": tests, "lines": {"module.py": {line: [0, 1, 2, 3], 99: [4]}}}
    Path(tmp_path, "map.json").write_text(json.dumps(document))
    chooser = CoverageMap(str(tmp_path / "map.json"))
    names, seconds = chooser.of(edits[0], every=False)
    assert names == ["a::fast", "b::only", "a::other", "a::slow"] and seconds == pytest.approx(6.3)
    assert chooser.of(edits[0], every=True)[0][:4] == ["a::fast", "a::other", "b::only", "a::slow"]
