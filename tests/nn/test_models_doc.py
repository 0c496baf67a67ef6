"""The example of docs/models.md runs as it stands and prints what the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["a layer", "torch's modules"])
def test_the_example_runs(part, tmp_path):
    before, after = PAGE.read_text().split("### Rules")
    text = before if part == "a layer" else after
    program, printed = re.findall(r"```(?:python)?\n(.*?)```", text, re.S)[-2:]
    script = tmp_path / "example.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=PAGE.parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    shown = printed.splitlines()
    if shown[-1] == "...":
        shown.pop()
    assert done.stdout.splitlines()[: len(shown)] == shown
