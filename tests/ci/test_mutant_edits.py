"""Promise: mutants of host code are other programs, and their tests are chosen by their line."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci" / "mutants"))

from chosen import chosen_files  # noqa: E402 (its folder is no package)
from edits import is_one, mutants_of  # noqa: E402
from run import CoverageMap  # noqa: E402
from swap import AtImport, swap  # noqa: E402

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
    assert chooser.of(edits[0], every=True) == (names, seconds)


FUNCTIONS = """
from functools import lru_cache

LIMIT = 3

def plain(a, b=2):
    return a + b

def outer(a):
    def inner(b):
        return a - b
    return inner

made = outer(10)
first, second = (lambda a: a * 2), (lambda a: a * 3)

@lru_cache
def kept(a):
    return a < 5

class Thing:
    size = 4

    def method(self):
        return [self.size + n for n in range(2)]
"""


@pytest.fixture
def module(tmp_path):
    """An imported module, and a function that replaces one text of it by another in its functions."""
    path = tmp_path / "swapped_module.py"
    path.write_text(FUNCTIONS)
    spec = importlib.util.spec_from_file_location("swapped_module", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["swapped_module"] = module
    spec.loader.exec_module(module)

    def edit(before, after):
        assert before in FUNCTIONS
        swap(path, FUNCTIONS, FUNCTIONS.replace(before, after, 1))

    yield module, edit
    del sys.modules["swapped_module"]


def test_functions_of_all_kinds_become_those_of_the_other_text(module):
    module, edit = module
    assert module.plain(1) == 3 and module.made(4) == 6 and module.second(2) == 6
    edit("a + b", "a * b")
    assert module.plain(3) == 6 and module.made(4) == 6
    edit("a - b", "a + b")
    assert module.made(4) == 14 and module.outer(1)(2) == 3 and module.plain(3) == 6
    edit("a * 3", "a * 4")
    assert module.second(2) == 8 and module.first(2) == 4
    edit("self.size + n", "self.size - n")
    assert module.Thing().method() == [4, 3]


@pytest.mark.parametrize(
    ("before", "after"),
    [("LIMIT = 3", "LIMIT = 4"), ("b=2", "b=3"), ("size = 4", "size = 5"), ("a < 5", "LIMIT")],
)
def test_what_only_an_import_shows_is_told_or_swapped(module, before, after):
    module, edit = module
    if before == "a < 5":
        edit(before, after)
        return
    with pytest.raises(AtImport):
        edit(before, after)


def test_a_module_that_is_not_imported_yet_is_left_to_its_import(tmp_path):
    swap(tmp_path / "never_imported.py", "a = 1", "a = 2")


SESSION = """
import json, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from warm import run_warm
source = Path(sys.argv[1], "judged.py").read_text()
names = ["test_judged.py::test_sum", "test_judged.py::test_wait", "test_judged.py::test_broken"]
edits = {"sum": ("a + b", "a - b"), "same": ("a + b", "b + a"), "import": ("LIMIT = 1", "LIMIT = 2"),
         "hang": ("set()", "wait()"), "loop": ("return n", "n += 1"),
         "no program": ("a + b", "a +")}
path = Path(sys.argv[1], "judged.py")
tasks = [(name, path, source, source.replace(*edit), names, 0.0) for name, edit in edits.items()]
tasks.append(("none", path, source, "", ["test_judged.py::gone"], 0.0))
def done(name, status, by, count, cpu):
    print(json.dumps([name, status, by.partition("::")[2], count]), file=sys.stderr, flush=True)
run_warm(Path(sys.argv[1]), tasks, done, False, Path(sys.argv[3]), float("inf"))
"""
JUDGED = """
import threading
LIMIT = 1
def add(a, b):
    return a + b
def wait():
    event = threading.Event()
    event.set()
    event.wait()
def count(n):
    while n:
        return n
"""
TESTS_OF_JUDGED = """
import judged
def test_sum():
    assert judged.add(2, 1) == 3 and judged.count(3) == 3
def test_wait():
    judged.wait()
def test_broken():
    assert judged.LIMIT == 5
"""


@pytest.mark.slow
def test_a_warm_session_tells_killed_survived_hung_and_what_an_import_shows(tmp_path):
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "judged.py").write_text(JUDGED)
    (tmp_path / "repository" / "test_judged.py").write_text(TESTS_OF_JUDGED)
    folders = [str(tmp_path / "repository"), str(ROOT / "ci" / "mutants"), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", SESSION, *folders], capture_output=True, text=True, timeout=250
    )
    found = {name: rest for name, *rest in map(json.loads, re.findall(r"(?m)^\[.*\]$", done.stderr))}
    assert found == {
        "sum": ["killed", "test_sum", 2], "same": ["survived", "", 2], "import": ["at import", "", 2],
        "no program": ["at import", "", 2], "hang": ["timeout", "", 2], "loop": ["timeout", "", 2],
        "none": ["no test", "", 0],
    }  # fmt: skip
