"""A checkpoint gives back every bit or names what is wrong; a failed save leaves the last good one whole."""

from __future__ import annotations

import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonrec import checkpoint
from tritonrec.checkpoint import CheckpointError, load, save

DENSE = {
    "layer.weight": torch.tensor([[1.5, -0.0], [float("nan"), float("inf")]]),
    "count": torch.tensor(7),
    "half": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
    "none": torch.zeros(0, 4),
}
TABLES = {
    "items": (torch.tensor([2**63 - 1, -(2**63), 0]), torch.randn(3, 5)),
    "a/b": (torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2)),
}
META = {"seed": 5, "optimizer": {"name": "adam", "betas": [0.9, 0.999]}, "note": "é", "nothing": None}


def bits(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def check(directory: Path, step: int, dense=DENSE, tables=TABLES, meta=META) -> None:
    found_step, found_dense, found_tables, found_meta = load(directory)
    assert found_step == step and found_meta == meta
    assert {name: bits(tensor) for name, tensor in found_dense.items()} == {
        name: bits(tensor) for name, tensor in dense.items()
    }
    assert {name: (bits(keys), bits(rows)) for name, (keys, rows) in found_tables.items()} == {
        name: (bits(keys), bits(rows)) for name, (keys, rows) in tables.items()
    }


def content(directory: Path, step: int) -> Path:
    (path,) = directory.glob(f"step-{step:012d}-*.safetensors")
    return path


def manifest(directory: Path, step: int) -> Path:
    return directory / f"step-{step:012d}.json"


def test_every_bit_comes_back(tmp_path):
    path = save(tmp_path / "new" / "place", 12, DENSE, TABLES, META)
    assert path == manifest(tmp_path / "new" / "place", 12)
    check(tmp_path / "new" / "place", 12)
    assert json.loads(path.read_text())["tensors"]["rows/items"] == ["torch.float32", [3, 5]]


def test_views_of_one_storage_are_copied(tmp_path):
    buffer = torch.randn(10, 6)
    dense = {"left": buffer[:, :3], "transposed": buffer.T, "tied": buffer, "tied_again": buffer}
    tables = {"upper": (torch.arange(4), buffer[:4, :2]), "lower": (torch.arange(6), buffer[4:])}
    save(tmp_path, 0, dense, tables, {})
    check(tmp_path, 0, dense, tables, {})


def test_nothing_at_all_is_legal(tmp_path):
    save(tmp_path, 0, {}, {}, {})
    check(tmp_path, 0, {}, {}, {})


@settings(deadline=None, max_examples=25)
@given(
    dense=st.dictionaries(st.text(max_size=8), st.lists(st.floats(width=32), max_size=4), max_size=3),
    tables=st.dictionaries(
        st.text(max_size=8), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=3
    ),
    width=st.integers(0, 3),
    meta=st.dictionaries(
        st.text(max_size=5), st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    ),
)
def test_any_names_and_values_come_back(tmp_path_factory, dense, tables, width, meta):
    directory = tmp_path_factory.mktemp("any")
    dense_tensors = {name: torch.tensor(values, dtype=torch.float32) for name, values in dense.items()}
    table_tensors = {
        name: (torch.tensor(keys, dtype=torch.int64), torch.randn(len(keys), width))
        for name, keys in tables.items()
    }
    save(directory, 3, dense_tensors, table_tensors, meta)
    check(directory, 3, dense_tensors, table_tensors, meta)


def test_the_last_two_are_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for step in (1, 5, 20):
        save(tmp_path, step, {"w": torch.full((3,), step)}, {}, {})
    assert checkpoint.steps(tmp_path) == [5, 20]
    assert len(list(tmp_path.iterdir())) == 5 and (tmp_path / "notes.txt").exists()
    assert load(tmp_path)[1]["w"].tolist() == [20] * 3
    assert load(tmp_path, step=5)[1]["w"].tolist() == [5] * 3


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    save(tmp_path, 1, DENSE, TABLES, META)
    for name in (".partial-000000000002.safetensors", "step-000000000002-0123456789abcdef.safetensors"):
        (tmp_path / name).write_bytes(b"half of it")
    check(tmp_path, 1)
    save(tmp_path, 3, DENSE, TABLES, META)
    assert len(list(tmp_path.iterdir())) == 4
    check(tmp_path, 3)


def test_a_step_saved_again_is_replaced(tmp_path):
    for value in (1, 2, 2):
        save(tmp_path, 4, {"w": torch.tensor(value)}, {}, {})
        assert load(tmp_path)[1]["w"].item() == value
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_older_checkpoint_does_not_hinder_a_new_one(tmp_path):
    save(tmp_path, 1, DENSE, TABLES, META)
    manifest(tmp_path, 1).write_text("{")
    save(tmp_path, 2, DENSE, TABLES, META)
    check(tmp_path, 2)


def refused(directory: Path, *parts: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


def test_a_truncated_file(tmp_path):
    save(tmp_path, 3, DENSE, TABLES, META)
    save(tmp_path, 7, DENSE, TABLES, META)
    path = content(tmp_path, 7)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    refused(tmp_path, str(path), f"has {size - 1} bytes, but {size} were written", "also holds step 3")
    assert load(tmp_path, step=3)[0] == 3


@pytest.mark.parametrize("where", [0, 0.5, 0.999])
def test_a_flipped_bit(tmp_path, where):
    save(tmp_path, 7, DENSE, TABLES, META)
    path = content(tmp_path, 7)
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 4
    path.write_bytes(data)
    message = refused(tmp_path, str(path), "was altered", "sha256")
    assert "also holds" not in message


def test_an_altered_manifest(tmp_path):
    path = save(tmp_path, 7, DENSE, TABLES, META)
    text = path.read_text()
    for changed in (
        text.replace('"seed": 5', '"seed": 6'),
        text[:-20],
        "[]",
        "{}",
        text.replace("sha256", "sha255"),
    ):
        path.write_text(changed)
        refused(tmp_path, str(path), "altered")
    path.write_text(text)
    check(tmp_path, 7)


def test_a_newer_version(tmp_path):
    path = save(tmp_path, 7, DENSE, TABLES, META)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    refused(tmp_path, str(path), "format version 2", "reads version 1")


def test_missing_things(tmp_path):
    refused(tmp_path / "absent", "absent holds no checkpoint")
    refused(tmp_path, f"{tmp_path} holds no checkpoint")
    save(tmp_path, 3, DENSE, TABLES, META)
    with pytest.raises(
        CheckpointError, match=r"step-000000000004\.json is missing; the directory also holds step 3"
    ):
        load(tmp_path, step=4)
    path = content(tmp_path, 3)
    path.unlink()
    refused(tmp_path, f"{path} is missing")


@contextmanager
def full_disk():
    """No file may grow beyond a kilobyte; not a fixture, for pytest's own report goes to a file as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path):
    small = {"w": torch.arange(5)}
    save(tmp_path, 1, small, {}, {})
    before = sorted(path.name for path in tmp_path.iterdir())
    refusal = r"step-000000000002\.json could not be written: .*untouched"
    with full_disk(), pytest.raises(CheckpointError, match=refusal):
        save(tmp_path, 2, {"w": torch.arange(5000)}, {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    check(tmp_path, 1, small, {}, {})
    with full_disk(), pytest.raises(CheckpointError, match=refusal):
        save(tmp_path, 2, small, {}, {"long": "x" * 2000})
    check(tmp_path, 1, small, {}, {})
    assert not list(tmp_path.glob(".partial-*"))


def test_leftovers_make_room_before_a_save(tmp_path):
    leftover = tmp_path / "step-000000000001-0123456789abcdef.safetensors"
    leftover.write_bytes(b"half of it")
    with full_disk(), pytest.raises(CheckpointError):
        save(tmp_path, 2, {"w": torch.arange(5000)}, {}, {})
    assert not leftover.exists()


@pytest.mark.parametrize("replaced", [False, True], ids=["new_step", "same_step"])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_at_any_moment_leaves_a_whole_checkpoint(tmp_path, monkeypatch, call, replaced):
    """Fail the first, second, ... call until a save goes through: the old or new state is there."""
    old, new = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    step = 1 if replaced else 2
    original = getattr(os, call)
    outcomes = []
    while not outcomes or outcomes[-1] != "saved":
        directory = tmp_path / str(len(outcomes))
        save(directory, 1, old, {}, {})
        allowed = iter([True] * len(outcomes) + [False])

        def failing(*arguments, allowed=allowed):
            if not next(allowed, True):
                raise OSError(28, "No space left on device")
            return original(*arguments)

        monkeypatch.setattr(os, call, failing)
        try:
            save(directory, step, new, {}, {})
            outcomes.append("saved")
        except CheckpointError as error:
            assert "No space left" in str(error)
            outcomes.append("failed")
        monkeypatch.setattr(os, call, original)
        found = load(directory)[1]["w"].tolist()
        published = outcomes[-1] == "saved" or (call == "fsync" and len(outcomes) == 4)
        assert found == (new if published else old)["w"].tolist()
        save(directory, step, new, {}, {})
        assert load(directory)[1]["w"].tolist() == [1] * 3
        assert len(list(directory.iterdir())) == (2 if replaced else 4)
    assert outcomes == ["failed"] * (4 if call == "fsync" else 2) + ["saved"]


def test_a_run_wound_back_is_refused(tmp_path):
    save(tmp_path, 30, DENSE, TABLES, META)
    with pytest.raises(ValueError, match=r"holds step 30 already, which is later than 15"):
        save(tmp_path, 15, DENSE, TABLES, META)
    check(tmp_path, 30)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(step=-1), r"step must be in \[0, 10\*\*12\), got -1"),
        (dict(meta={"a": (1, 2)}), "meta would be changed by JSON"),
        (dict(meta={1: 2}), "meta would be changed by JSON"),
        (dict(meta={"a": float("nan")}), "meta cannot be written as JSON"),
        (dict(meta={"a": torch.zeros(1)}), "meta cannot be written as JSON"),
        (dict(tables={"t": (torch.zeros(2), torch.zeros(2, 2))}), r"keys of table 't' must be \(n,\) int64"),
        (
            dict(tables={"t": (torch.arange(3), torch.zeros(2, 2))}),
            r"rows of table 't' must be \(3, w\) .*\(2, 2\)",
        ),
        (dict(tables={"t": (torch.arange(2), torch.zeros(2, 2).double())}), r"rows of table 't'.*float64"),
    ],
)
def test_bad_arguments_are_named(tmp_path, changes, message):
    arguments = dict(step=1, dense=DENSE, tables=TABLES, meta=META) | changes
    with pytest.raises(ValueError, match=message):
        save(tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []
