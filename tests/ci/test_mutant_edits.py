"""Promise: mutants of host code are other programs, and their tests are chosen by their line."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import run
from edits import is_one, mutants_of
from run import EQUIVALENT

ROOT = Path(__file__).resolve().parents[2]

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


def test_every_mutant_made_by_hand_is_another_program_whose_tests_are_there():
    for mutant, tests in run.intended(ROOT):
        assert is_one(mutant, (ROOT / mutant.file).read_text()), mutant.before
        assert tests
        for file, _, test in (each.partition("::") for each in tests):  # one that is gone would be a kill
            assert f"def {test}".partition("[")[0] in (ROOT / file).read_text(), test


def test_every_equivalent_mutant_has_a_reason_and_a_file():
    for name, reason in json.loads(EQUIVALENT.read_text()).items():
        assert Path(ROOT, name.partition(":")[0]).is_file() and reason.endswith(".")


SESSION = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import run
run.PATIENCE, run.IDLE, run.CPU_SECONDS, run.ROOT = 60.0, 4.0, 15, Path(sys.argv[2], "source")
at = (run.ROOT / "judged.py").read_text().index(sys.argv[3])
mutant = run.Mutant("judged.py", 1, "edit", at, at + len(sys.argv[3]), *sys.argv[3:])
names = [f"test_judged.py::test_{each}" for each in ("sum", "wait", "broken")]
print(json.dumps(run.Judge(Path(sys.argv[2], "repository")).judge(mutant, names, 0.0)))
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
VERDICTS = {
    "a + b -> a - b": ("killed", "test_sum"), "a + b -> b + a": ("survived", ""),
    "set() -> wait()": ("timeout", ""), "return n -> n += 1": ("timeout", ""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("edit", VERDICTS)
def test_a_judge_tells_killed_survived_and_hung_and_leaves_broken_tests_out(edit, tmp_path):
    copy = tmp_path / "repository"
    copy.mkdir()
    (copy / "judged.py").write_text(JUDGED)
    (copy / "test_judged.py").write_text(TESTS_OF_JUDGED)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "judged.py").write_text(JUDGED)
    before, after = edit.split(" -> ")
    done = subprocess.run(
        [sys.executable, "-c", SESSION, str(ROOT / "ci" / "mutants"), str(tmp_path), before, after],
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert (found["status"], found["by"].rpartition("::")[2]) == VERDICTS[edit], done.stderr
