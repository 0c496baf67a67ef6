"""Training with rows on disk, also behind a cache, that is killed in a save ends with the bits of memory."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from disk_training import EVERY, LAST, train
from speeds import slow_except
from trainer_parts import parts, same, state, trainer

from tritonrec.checkpoint import steps
from tritonrec.embedding import Placement


@pytest.mark.if_changed
@pytest.mark.parametrize("kills", slow_except([2], [2, 12]))
def test_killed_at_any_moment_it_goes_on_from_the_last_whole_checkpoint(tmp_path, kills):
    folder, rows, draw = tmp_path / "checkpoints", tmp_path / "rows", random.Random(kills)
    rows.mkdir()
    command = [sys.executable, Path(__file__).with_name("disk_training.py"), folder, rows]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for run in range(kills + 1):
        before = steps(folder)[-1] if folder.is_dir() and steps(folder) else 0
        storage = ("disk", "cached")[run % 2]
        child = subprocess.Popen([*command, storage], env=env, stdout=subprocess.PIPE, text=True)
        saved = before
        if run < kills:  # after a save has begun, and within the time of some of them
            for _ in range(draw.randint(1, LAST // 2 // kills)):
                saved = int(child.stdout.readline())
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(draw.uniform(0, 0.03))
            child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == (-signal.SIGKILL if run < kills else 0)
        assert max(before, saved - EVERY) <= (steps(folder) or [0])[-1]
        assert os.listdir(rows) == []
    loaded, expected = parts(placement=Placement("disk", path=str(rows), memory="2000")), parts()
    with trainer(loaded) as training:
        assert training.load(folder) == LAST
    train(expected)
    assert same(state(loaded), state(expected))
