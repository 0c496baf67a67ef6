"""The example of docs/models.md runs as it stands and prints what the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


@pytest.mark.slow
def test_the_example_runs(tmp_path):
    program, printed = re.findall(r"```(?:python)?\n(.*?)```", PAGE.read_text().split("### Rules")[0], re.S)[
        -2:
    ]
    script = tmp_path / "example.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=PAGE.parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    shown = printed.splitlines()
    assert shown.pop() == "..."
    assert done.stdout.splitlines()[: len(shown)] == shown
