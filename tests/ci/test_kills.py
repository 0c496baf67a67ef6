"""Promise: the attack by kills finds what is left behind, and finds nothing."""

import importlib.util
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "ci" / "attack" / "kills.py"
SPEC = importlib.util.spec_from_file_location("kills", PATH)
kills = importlib.util.module_from_spec(SPEC)
sys.modules["kills"] = kills
SPEC.loader.exec_module(kills)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

KILL = kills.Kill((1, 1), 1, 1, 1, "launcher", "SIGKILL", "start", 0.2, (1, 1, 1))
READY = "; import sys, time; open(sys.argv[1], 'w').close(); time.sleep(60)"
LEAVES_A_PROCESS = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)" + READY
LEAVES_A_FOLDER = "import tempfile; tempfile.mkdtemp(prefix='tritonrec-')" + READY


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Runs `code` in the place of a training, and kills when it says that it is ready."""
    ready = tmp_path / "ready"

    def wait(kill, folder, process):
        while not ready.exists():
            time.sleep(0.01)

    monkeypatch.setattr(kills, "wait_for_phase", wait)

    def run(code):
        monkeypatch.setattr(kills, "command", lambda kill, folder: [sys.executable, "-c", code, str(ready)])
        return kills.perform(KILL, random.Random(1), None, "", tmp_path / "place")

    return run


@pytest.mark.if_changed
@pytest.mark.parametrize(
    "code, problem",
    [
        (LEAVES_A_PROCESS, "processes are left"),
        (LEAVES_A_FOLDER, "left in the temporary folder: ['tritonrec-"),
    ],
)
def test_what_a_killed_run_leaves_is_found(monkeypatch, tmp_path, fake, code, problem):
    monkeypatch.setattr(kills, "PATIENCE", 1.0)
    assert fake(code)["problem"].startswith(problem)
    deadline = time.monotonic() + 10
    while kills.processes_of(str(tmp_path)):  # it kills what was left
        assert time.monotonic() < deadline


class Pool:
    def run(self, function, world_size, run, quiet, replicas):
        assert run.resume and (world_size, replicas) == (3, 1)
        return [{"digest": "abc"}]


def test_other_bits_after_a_kill_are_found(tmp_path):
    kill = replace(KILL, resume=(3, 1, 2))
    assert kills.resumed(kill, Pool(), "abc", tmp_path) == ""
    assert kills.resumed(kill, Pool(), "abd", tmp_path) == "digest abc, expected abd"


@pytest.mark.slow
@pytest.mark.multi_rank
def test_killed_runs_leave_nothing_and_go_on_with_the_same_bits(monkeypatch, capsys):
    monkeypatch.setattr(kills, "MESHES", [(1, 1), (2, 1)])
    assert kills.attack(3, seed=4), capsys.readouterr().out
