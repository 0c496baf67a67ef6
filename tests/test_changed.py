"""Promise: tests of a tool are left out only where nothing that it or they import has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import changed
import pytest
from test_layers import TOOLS

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "tritonrec/__init__.py": "if TYPE_CHECKING:\n    from .pipeline import Trainer\n",
    "tritonrec/kernels/__init__.py": "",
    "tritonrec/kernels/unique/op.py": "",
    "tritonrec/kernels/unique/numba_unique.py": "",
    "tritonrec/pipeline/__init__.py": "from ..kernels.unique.op import unique\n",
    "tritonrec/pipeline/lanes.py": "'see tritonrec.serving'\n",
    "tritonrec/serving/__init__.py": "from .rows import take\n",
    "tritonrec/serving/rows.py": "def take():\n    from ..pipeline.lanes import Lane\n",
    "tritonrec/resilience/__init__.py": "",
    "tritonrec/harness/cli/__init__.py": "",
    "tritonrec/harness/cli/serve_bench.py": "from ...data import load\n",
    "tritonrec/harness/pytest_plugin.py": "",
    "tritonrec/data/__init__.py": "load = 1\n",
    "tests/conftest.py": "",
    "tests/kit.py": "",
    "tests/serving/test_rows.py": "import kit\nPROGRAM = 'tritonrec serve-bench'\nPAGE = 'serving.md'\n",
    "tests/resilience/test_lost.py": "from tritonrec import Trainer\nSCRIPT = 'ci/lose.py'\n",
    "tests/pipeline/test_lanes.py": "",
    "ci/lose.py": "import losing\n",
    "ci/losing.py": "",
    "docs/serving.md": "",
    "docs/index.md": "",
    "pyproject.toml": "",
}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


BOTH = {"serving", "resilience"}


@pytest.mark.parametrize(
    ("path", "tools"),
    {
        "tritonrec/serving/rows.py": {"serving"},
        "tritonrec/pipeline/lanes.py": {"serving"},  # imported in a function
        "tritonrec/pipeline/__init__.py": BOTH,  # around that module; and by a name of `tritonrec`
        "tritonrec/kernels/unique/numba_unique.py": BOTH,  # beside what is imported
        "tritonrec/resilience/__init__.py": {"resilience"},
        "tritonrec/data/__init__.py": {"serving"},  # by a command that a string runs
        "tests/kit.py": {"serving"},
        "tests/resilience/test_lost.py": {"resilience"},
        "tests/pipeline/test_lanes.py": set(),
        "ci/losing.py": {"resilience"},
        "docs/serving.md": {"serving"},
        "docs/index.md": set(),
        "pyproject.toml": BOTH,
        "tests/conftest.py": BOTH,
        "tritonrec/__init__.py": BOTH,
        "tritonrec/harness/pytest_plugin.py": BOTH,
        "tritonrec/gone.py": BOTH,
    }.items(),
)
def test_a_change_runs_the_tests_of_the_tools_that_it_concerns(root, path, tools):
    assert BOTH - changed.left_out(root, {path}).keys() == tools


FILES_OF_TESTS = {
    "tests/serving/test_rows.py",
    "tests/resilience/test_lost.py",
    "tests/pipeline/test_lanes.py",
}


@pytest.mark.parametrize(
    ("path", "names"),
    {
        "tritonrec/kernels/unique/numba_unique.py": {"lost"},
        "tritonrec/data/__init__.py": {"rows"},
        "tests/kit.py": {"rows"},
        "ci/losing.py": {"lost"},
        "tests/pipeline/test_lanes.py": {"lanes"},
        "docs/serving.md": {"rows"},
        "docs/index.md": set(),
        "tests/conftest.py": {"rows", "lost", "lanes"},
        "ci/gone.py": {"rows", "lost", "lanes"},
    }.items(),
)
def test_a_change_runs_the_files_that_import_or_name_what_it_changes(root, path, names):
    found = changed.concerned(root, {path}, FILES_OF_TESTS)
    assert {Path(file).stem.removeprefix("test_") for file in found} == names


def git(root, *words):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(root, tmp_path_factory):
    """Of a repository with one commit."""
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    clone = tmp_path_factory.mktemp("clone")
    git(clone, "clone", "-q", str(root), ".")
    return clone


def option(root):
    """What `make test` adds."""
    return subprocess.run([ROOT / "ci/changed_since.sh"], cwd=root, capture_output=True, text=True).stdout


def test_a_clone_at_its_upstream_and_a_folder_without_one_run_everything(clone, root, tmp_path_factory):
    assert option(clone) == option(root) == option(tmp_path_factory.mktemp("none")) == ""


def test_commits_and_files_that_are_not_committed_count(clone):
    head = git(clone, "rev-parse", "HEAD")
    (clone / "docs/new page.md").write_text("")
    assert option(clone) == f"--changed-since {head}\n"
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "page")
    assert option(clone) == f"--changed-since {head}\n"
    (clone / "tests/kit.py").write_text("x = 1\n")
    git(clone, "mv", "ci/losing.py", "ci/lost.py")
    (clone / "tests/other.py").write_text("")
    assert changed.changed_files(clone, head) == {
        "docs/new page.md", "tests/kit.py", "tests/other.py", "ci/losing.py", "ci/lost.py"
    }  # fmt: skip
    git(clone, "checkout", "-qb", "branch")  # without an upstream of its own
    assert option(clone) == f"--changed-since {head}\n"


@pytest.mark.if_changed
def test_pytest_leaves_them_out_and_says_so(clone):
    for name in ("changed.py", "conftest.py", "interpreter.py", "speeds.py"):
        shutil.copy(ROOT / "tests" / name, clone / "tests")
    for test in clone.glob("tests/*/test_*.py"):
        test.write_text("def test_it():\n    pass\n")
    marked = "import pytest\n@pytest.mark.if_changed\ndef test_it():\n    pass\n"
    (clone / "tests/resilience/test_lost.py").write_text(f"import tritonrec.resilience\n{marked}")
    (clone / "tests/pipeline/test_lanes.py").write_text(marked)
    marks = 'markers = ["if_changed"]\naddopts = "--strict-markers"\n'
    (clone / "pyproject.toml").write_text(f'[tool.pytest.ini_options]\ntestpaths = ["tests"]\n{marks}')
    (clone / ".gitignore").write_text("__pycache__\n")
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "tests")
    (clone / "tritonrec/resilience/__init__.py").write_text("x = 1\n")

    def run(*options):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=clone / "tests", env=environment, capture_output=True, text=True)
        return done.stdout + done.stderr

    found = run("-n", "2", "--changed-since", "HEAD")
    assert "2 passed" in found and "changed since HEAD: tests of" in found, found
    assert "serving (1 files)" in found and "resilience" not in found
    quick = "--most-cases", "2"
    assert "1 passed, 1 deselected" in run("-n", "0", *quick, "--changed-since", "HEAD")
    drawn = run("-n", "2", *quick, "--draw", "other", "--changed-since", "HEAD")
    assert "1 passed" in drawn and "--draw 'other'" in drawn
    assert "1 passed, 2 deselected" in run("-n", "0", *quick) and "3 passed" in run(
        "-n", "0", *quick, "--long"
    )
    assert "--changed-since nowhere" in run("--changed-since", "nowhere")


def test_every_tool_has_its_files():
    assert TOOLS - {"harness", "__main__"} <= changed.TOOLS.keys()
    for tool, (folders, patterns) in changed.TOOLS.items():
        assert all((ROOT / folder).is_dir() for folder in folders), tool
        assert all([*ROOT.glob(pattern)] for pattern in patterns), tool


@pytest.mark.if_changed
def test_a_change_of_what_trains_concerns_every_tool_and_one_of_the_lab_not_all():
    core = "tritonrec/kernels/unique/numba_unique.py"  # imported by a name made at run time
    sources = changed.Sources(ROOT)
    assert core in sources.files and changed.left_out(ROOT, {core}, sources) == {}
    found = changed.left_out(ROOT, {"docs/index.md", "tritonrec/harness/lab/__init__.py"}, sources)
    assert {"serving", "torchrec"} <= found.keys() and "simulator and lab" not in found
