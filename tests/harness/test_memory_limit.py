"""Promise: `train` that runs out of memory saves, says so, and goes on later with the same bits."""

import json
from inspect import unwrap

import commands
import pytest

from tritonrec.capacity import MemoryWatch, Room
from tritonrec.capacity import watch as watching

TRAIN = ["--data", "zipf:users=60,items=300,seed=1", "--dim", "8", "--max-seq-len", "8", "--batch-size", "8"]


@pytest.mark.if_changed
def test_train_saves_and_goes_on_with_the_same_bits(monkeypatch, tmp_path):
    """A run that stopped for memory and goes on with more has the state of one that was never stopped."""
    at, whole, done = tmp_path / "run", tmp_path / "whole.json", tmp_path / "done.json"
    code, output, _ = commands.invoke("train", *TRAIN, "--steps", 30, "--json", whole)
    assert code == 0, output
    looks = iter([10 * watching.MIB])
    scarce = lambda limit: Room(next(looks, 0), 1 << 30, "a machine")  # noqa: E731
    monkeypatch.setattr(watching, "memory_left", scarce)
    made = unwrap(MemoryWatch.__init__)
    monkeypatch.setattr(made, "__kwdefaults__", {**made.__kwdefaults__, "reserve": 1})
    code, output, _ = commands.invoke("train", *TRAIN, "--steps", 30, "--checkpoint", at)
    assert code == 1 and "stopping" in output and "go on with --resume" in output, output
    monkeypatch.undo()
    code, output, _ = commands.invoke(
        "train", *TRAIN, "--steps", 30, "--checkpoint", at, "--resume", "--json", done
    )
    assert code == 0, output
    assert json.loads(done.read_text())["digest"] == json.loads(whole.read_text())["digest"]
    assert json.loads(done.read_text())["steps_run"] < 30


@pytest.mark.parametrize("value", ["lots", "-1GiB", "1GB"])
def test_a_limit_is_a_size(value):
    code, output, _ = commands.invoke("train", "--memory-limit", value)
    assert code == 2 and "memory_limit must be bytes, or such as '512MiB'" in output


def test_where_the_kernel_does_not_tell_training_goes_on(monkeypatch):
    def unknown(limit):
        raise OSError("no /proc here")

    monkeypatch.setattr(watching, "memory_left", unknown)
    code, output, _ = commands.invoke("train", *TRAIN, "--steps", 3)
    assert code == 0 and "memory is not watched: no /proc here" in output
    code, output, _ = commands.invoke("train", *TRAIN, "--steps", 3, "--memory-limit", "1GiB")
    assert code == 2 and "no /proc here" in output
