"""The blocks of "Export a model" in docs/serving.md run as pasted, one after another."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"


@pytest.mark.slow
def test_the_blocks_run_as_pasted(tmp_path):
    text = PAGE.read_text().split("## Export a model")[1].split("## Lookups with a bounded lag")[0]
    commands, *_ = re.findall(r"```\n(.*?)```", text, re.S)
    for line in commands.splitlines():
        name, *words = shlex.split(line)
        assert name == "tritonrec"
        done = subprocess.run(
            [sys.executable, "-m", "tritonrec", *words], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "out/model/dense.pt2").is_file() and "exported step 20 to out/model" in done.stdout
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
