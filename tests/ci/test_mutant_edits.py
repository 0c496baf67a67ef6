"""Promise: mutants of host code are other programs, and their tests are chosen by their line."""

import ast
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci" / "mutants"))

import run  # noqa: E402
from chosen import chosen_files  # noqa: E402 (its folder is no package)
from edits import is_one, mutants_of  # noqa: E402
from run import EQUIVALENT, CoverageMap, report  # noqa: E402
from swap import AtImport, swap  # noqa: E402

SOURCE = '''
"""A module."""
from triton import jit

LIMIT: int = 3

@jit
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


def test_tests_of_a_line_are_chosen_fastest_first_and_run_file_by_file(tmp_path, edits):
    tests = [["a::slow", 5.0], ["a::fast", 0.1], ["a::other", 0.2], ["b::only", 1.0], ["c", 9.0]]
    line = edits[0].line
    document = {"tests": tests, "lines": {"module.py": {line: [0, 1, 2, 3], 99: [4]}}}
    Path(tmp_path, "map.json").write_text(json.dumps(document))
    chooser = CoverageMap(str(tmp_path / "map.json"))
    seconds = chooser.of(edits[0], every=False)
    assert list(seconds.items()) == [("a::fast", 0.1), ("a::other", 0.2), ("a::slow", 5.0), ("b::only", 1.0)]
    assert chooser.of(edits[0], every=True) == seconds


def test_maps_are_put_together(tmp_path, edits):
    for name, seconds in (("a::first", 2.0), ("b::second", 1.0)):
        document = {"tests": [[name, seconds]], "lines": {"module.py": {edits[0].line: [0]}}}
        Path(tmp_path, f"{name[0]}.json").write_text(json.dumps(document))
    chooser = CoverageMap(str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert chooser.of(edits[0], every=False) == {"b::second": 1.0, "a::first": 2.0}


def test_a_name_stays_while_other_lines_change(tmp_path, edits):
    Path(tmp_path, "module.py").write_text(SOURCE.replace("LIMIT: int = 3", "MORE = 4\nLIMIT: int = 3"))
    names = {each.name for each in mutants_of(tmp_path, "module.py")}
    assert {each.name for each in edits} <= names


def test_a_report_counts_equivalent_mutants_apart_and_names_the_survivors(capsys):
    ends = {"by": "t.py::t", "before": "a", "after": "b", "line": 7, "cpu_seconds": 1.0}
    statuses = {
        "killed": "killed",
        "hangs": "timeout",
        "left": "survived",
        "same": "survived",
        "bare": "no test",
    }
    report([{"name": n, "status": status} | ends for n, status in statuses.items()], {"same": "it is"})
    said = capsys.readouterr().out
    assert "left (line 7): a  ->  b" in said and "bare (line 7)" in said and "same (line" not in said
    assert "killed or hung, of those not equivalent: 50.0%" in said and "'equivalent': 1" in said


@pytest.mark.parametrize(
    ("end", "hung", "outcome"),
    [(0, False, "survived"), (1, False, "killed"), (0, True, "timeout"), (-signal.SIGKILL, False, "timeout"),
     (-signal.SIGXCPU, False, "timeout"), (-signal.SIGSEGV, False, "killed")],
)  # fmt: skip
def test_how_the_tests_of_a_mutant_end(tmp_path, monkeypatch, end, hung, outcome):
    def child(*_):
        if end < 0:
            signal.signal(-end, signal.SIG_DFL) if -end != signal.SIGKILL else None
            os.kill(os.getpid(), -end)
        os._exit(end)

    monkeypatch.setattr(run, "_child", child)
    monkeypatch.setattr(run, "wait", lambda *_: hung)
    assert run.run_tests(tmp_path / "copy", [], 1.0)[0] == outcome


def test_every_mutant_made_by_hand_is_another_program_whose_tests_are_there():
    for mutant, tests in run.intended(ROOT):
        assert is_one(mutant, (ROOT / mutant.file).read_text()), mutant.before
        assert tests and all((ROOT / each.partition("::")[0]).exists() for each in tests)


def test_every_equivalent_mutant_has_a_reason_and_a_file():
    for name, reason in json.loads(EQUIVALENT.read_text()).items():
        assert Path(ROOT, name.partition(":")[0]).is_file() and reason.endswith(".")


FUNCTIONS = """
from functools import lru_cache
from numba import njit

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

@njit
def kernel(a):
    return a - 7

@njit
def caller(a):
    return 2 * kernel(a)

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


def test_kernels_that_call_an_edited_one_are_compiled_again(module):
    module, edit = module
    assert module.caller(10) == 6 and module.kernel(10) == 3
    edit("a - 7", "a + 7")
    assert module.caller(10) == 34 and module.kernel(10) == 17


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
names = {f"test_judged.py::test_{each}": 0.0 for each in ("sum", "wait", "broken")}
edits = {"sum": ("a + b", "a - b"), "same": ("a + b", "b + a"), "import": ("LIMIT = 1", "LIMIT = 2"),
         "hang": ("set()", "wait()"), "loop": ("return n", "n += 1"),
         "no program": ("a + b", "a +")}
path = Path(sys.argv[1], "judged.py")
tasks = [(name, path, source, source.replace(*edit), names) for name, edit in edits.items()]
tasks.append(("none", path, source, "", {"test_judged.py::gone": 0.0}))
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


@pytest.mark.parametrize("ends", [True, False])
def test_a_session_that_a_signal_ends_is_told_from_one_that_ends_by_itself(tmp_path, monkeypatch, ends):
    monkeypatch.setattr(
        run, "run_warm", lambda *given: None if ends else os.kill(os.getpid(), signal.SIGKILL)
    )
    assert run.judge_warm(tmp_path / "copy", [], CoverageMap(), False, 0.0, print) == ends
