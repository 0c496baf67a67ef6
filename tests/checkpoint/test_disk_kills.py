"""Training with rows on disk, keys too or behind a cache, that is killed ends with the bits of memory."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from disk_training import EVERY, LAST, placed, train
from speeds import slow_except
from trainer_parts import parts, same, state, trainer

from tritonrec.checkpoint import steps

WRITTEN = 4864
"""Bytes of pages of keys that the training writes from its first step on; from a checkpoint on it is more."""


def script(folder, rows, *more):
    rows.mkdir(exist_ok=True)
    return [sys.executable, Path(__file__).with_name("disk_training.py"), folder, rows, *more]


ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.if_changed
@pytest.mark.parametrize("kills", slow_except([2], [2, 12]))
def test_killed_at_any_moment_it_goes_on_from_the_last_whole_checkpoint(tmp_path, kills):
    folder, rows, draw = tmp_path / "checkpoints", tmp_path / "rows", random.Random(kills)
    for run in range(kills + 1):
        before = steps(folder)[-1] if folder.is_dir() and steps(folder) else 0
        storage = ("keys", "cached", "disk")[run % 3]
        child = subprocess.Popen(script(folder, rows, storage), env=ENV, stdout=subprocess.PIPE, text=True)
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
    loaded, expected = parts(placement=placed("keys", rows)), parts()
    with trainer(loaded) as training:
        assert training.load(folder) == LAST
    train(expected)
    assert same(state(loaded), state(expected))


@pytest.mark.if_changed
@pytest.mark.parametrize("kills", slow_except([2], [2, 12]))
def test_killed_at_any_byte_of_pages_of_keys_it_goes_on_with_the_bits_of_memory(tmp_path, kills):
    folder, rows, draw = tmp_path / "checkpoints", tmp_path / "rows", random.Random(kills)
    for _ in range(kills):
        ended = subprocess.run(script(folder, rows, "keys", str(draw.randrange(WRITTEN))), env=ENV)
        assert ended.returncode == -signal.SIGKILL and os.listdir(rows) == []
    made, expected = parts(placement=placed("keys", rows)), parts()
    train(made, folder)
    train(expected)
    assert same(state(made), state(expected))
