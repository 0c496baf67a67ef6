"""Promise: the five minutes of docs/server.md run as pasted, from `tritonrec train` to the answer of `curl`.

`tests/examples/test_docs.py` parses the page's commands and runs its Python, which takes seconds.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tritonrec.serving import Predictor

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/server.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_from_train_to_curl(tmp_path):
    part = PAGE[PAGE.index("\n## Five minutes") : PAGE.index("\n## Paths")]
    commands, asked, printed = re.findall(r"^```\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    events = re.findall(r"^curl .*$", PAGE[PAGE.index("\n### Users' events") :], re.MULTILINE)
    pip, *work, last = commands.splitlines()
    assert pip == "pip install 'tritonrec[serve]'" and last.endswith("--port 8000")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def ours(line):
        return [sys.executable, "-m", *shlex.split(line)]

    for line in work:
        subprocess.run(ours(line), cwd=tmp_path, env=environment, check=True, capture_output=True)
    running = subprocess.Popen(
        ours(last.replace("--port 8000", "--port 0")),
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
    )
    try:
        port = re.fullmatch(r"serving at http://127.0.0.1:(\d+)\n", running.stdout.readline())[1]

        def curl(line):
            command = shlex.split(line.replace("localhost:8000", f"localhost:{port}"))
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        assert curl(asked) == printed.rstrip("\n")
        found = json.loads(printed)
        items, scores = Predictor.load(tmp_path / "out/model").retrieve([[3, 7, 12]], 2)
        assert found["items"] == items.tolist() and found["scores"] == scores.tolist()
        assert json.loads(curl(events[0]))["events"] == 3 and curl(events[1]) == printed.rstrip("\n")
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    finally:
        running.kill()
        running.communicate()
