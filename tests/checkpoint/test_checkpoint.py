"""A checkpoint gives back every bit or names what is wrong; a failed save leaves the last good one whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from power_cut import Disk
from simulated import ascending, same
from speeds import examples

from tritonrec import checkpoint
from tritonrec.checkpoint import CheckpointError, files, load, save
from tritonrec.checkpoint.manifest import add_checksum, read_manifest

DENSE = {
    "layer.weight": torch.tensor([[1.5, -0.0], [float("nan"), float("inf")]]),
    "count": torch.tensor(7),
    "half": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
    "none": torch.zeros(0, 4),
}
TABLES = {
    "items": {
        "keys": torch.tensor([2**63 - 1, -(2**63), 0]),
        "rows": torch.randn(3, 5),
        "heat": torch.tensor([255, 0, 7], dtype=torch.uint8),
        "half": torch.randn(3, 2, 2).to(torch.bfloat16),
    },
    "a/b": {"keys": torch.zeros(0, dtype=torch.int64), "rows": torch.zeros(0, 2)},
}
META = {"seed": 5, "optimizer": {"name": "adam", "betas": [0.9, 0.999]}, "note": "é", "nothing": None}


def check(directory: Path, step: int, dense=DENSE, tables=TABLES, meta=META) -> None:
    found = load(directory)
    assert found.step == step and found.meta == meta
    assert same(found.dense, dense)
    assert found.tables.keys() == tables.keys()
    for name, table in tables.items():
        assert same(found.tables[name], ascending(table))


def content(directory: Path, step: int, table: str = "items") -> Path:
    (path,) = directory.glob(f"step-{step:012d}/{table}.*.safetensors")
    return path


def names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def manifest(directory: Path, step: int) -> Path:
    return directory / f"step-{step:012d}.json"


def test_every_bit_comes_back(tmp_path):
    saved = save(tmp_path / "new" / "place", 12, DENSE, TABLES, META)
    assert saved.path == manifest(tmp_path / "new" / "place", 12)
    check(tmp_path / "new" / "place", 12)
    table = json.loads(saved.path.read_text())["tables"]["items"]
    assert table["columns"]["rows"] == ["float32", [5]]
    written = sum(path.stat().st_size for path in saved.path.parent.rglob("*.safetensors"))
    assert saved.bytes == written == load(saved.path.parent).bytes_read


def test_views_of_one_storage_are_copied(tmp_path):
    buffer = torch.randn(10, 6)
    dense = {"left": buffer[:, :3], "transposed": buffer.T, "tied": buffer, "tied_again": buffer}
    tables = {
        "upper": {"keys": torch.arange(4), "rows": buffer[:4, :2], "again": buffer[:4, :2]},
        "lower": {"keys": torch.arange(6), "rows": buffer[4:]},
    }
    save(tmp_path, 0, dense, tables, {})
    check(tmp_path, 0, dense, tables, {})


def test_an_empty_checkpoint_is_legal(tmp_path):
    save(tmp_path, 0, {}, {}, {})
    check(tmp_path, 0, {}, {}, {})


@pytest.mark.if_changed
@settings(max_examples=examples(25))
@given(
    dense=st.dictionaries(st.text(max_size=8), st.lists(st.floats(width=32), max_size=4), max_size=3),
    tables=st.dictionaries(
        st.text(max_size=8), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4, unique=True), max_size=3
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
        name: {"keys": torch.tensor(keys, dtype=torch.int64), "rows": torch.randn(len(keys), width)}
        for name, keys in tables.items()
    }
    save(directory, 3, dense_tensors, table_tensors, meta)
    check(directory, 3, dense_tensors, table_tensors, meta)


def test_names_that_look_alike_in_a_file_name_stay_apart(tmp_path):
    one = {"keys": torch.tensor([5]), "rows": torch.ones(1, 2)}
    tables = {"a/b": one, "a_b": one, "a:b": {"keys": torch.tensor([5]), "rows": torch.zeros(1, 2)}}
    tables |= {"x" * 300: one, "x" * 301: one}
    save(tmp_path, 1, {}, tables, {})
    check(tmp_path, 1, {}, tables, {})
    assert len(names(tmp_path)) == 1 + 1 + 5


def test_the_last_two_are_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for step in (1, 5, 20):
        save(tmp_path, step, {"w": torch.full((3,), step)}, {}, {})
    assert checkpoint.steps(tmp_path) == [5, 20]
    assert len(names(tmp_path)) == 5 and (tmp_path / "notes.txt").exists()
    assert load(tmp_path).dense["w"].tolist() == [20] * 3
    assert load(tmp_path, step=5).dense["w"].tolist() == [5] * 3


def test_a_power_cut_leaves_no_manifest_without_its_files(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, tmp_path, lambda path: path.suffix == ".json")
    for step in (1, 2, 3):
        save(tmp_path, step, DENSE, TABLES, META)
        assert not disk.named and disk.commits == step


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    save(tmp_path, 1, DENSE, TABLES, META)
    leftovers = [
        ".partial-step-000000000002.json",
        "step-000000000001/items.0000-7fff.0123456789abcdef.safetensors",
        "step-000000000002/dense.0123456789abcdef.safetensors",
        "step-000000000002/.partial-items.0000-ffff.safetensors",
    ]
    for name in leftovers:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half of it")
    (tmp_path / "step-000000000001" / "mine.safetensors").write_bytes(b"mine")
    check(tmp_path, 1)
    save(tmp_path, 3, DENSE, TABLES, META)
    assert not [name for name in leftovers if (tmp_path / name).exists()]
    assert len(names(tmp_path)) == 2 * 3 + 1 and not (tmp_path / "step-000000000002").exists()
    check(tmp_path, 3)


def test_a_step_saved_again_is_replaced(tmp_path):
    for value in (1, 2, 2):
        save(tmp_path, 4, {"w": torch.tensor(value)}, {}, {})
        assert load(tmp_path).dense["w"].item() == value
    assert len(names(tmp_path)) == 2


def test_a_damaged_older_checkpoint_does_not_hinder_a_new_one(tmp_path):
    save(tmp_path, 1, DENSE, TABLES, META)
    manifest(tmp_path, 1).write_text("{")
    save(tmp_path, 2, DENSE, TABLES, META)
    check(tmp_path, 2)


def test_files_of_a_checkpoint_that_cannot_be_read_stay(tmp_path):
    """It may be that of a newer tritonrec; it goes when two newer ones are there."""
    save(tmp_path, 1, DENSE, TABLES, META)
    path = manifest(tmp_path, 1)
    path.write_text(path.read_text().replace('"version": 2', '"version": 3'))
    before = names(tmp_path)
    save(tmp_path, 2, DENSE, TABLES, META)
    assert set(before) < set(names(tmp_path))
    save(tmp_path, 3, DENSE, TABLES, META)
    assert not set(before) & set(names(tmp_path))


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
    assert load(tmp_path, step=3).step == 3


@pytest.mark.parametrize("where, words", [(0, "its header"), (0.8, "sha256"), (0.999, "sha256")])
def test_a_flipped_bit(tmp_path, where, words):
    save(tmp_path, 7, DENSE, TABLES, META)
    path = content(tmp_path, 7)
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 4
    path.write_bytes(data)
    message = refused(tmp_path, str(path), "was altered", words)
    assert "also holds" not in message


def test_an_altered_manifest(tmp_path):
    path = save(tmp_path, 7, DENSE, TABLES, META).path
    text = path.read_text()
    for changed in (
        text.replace('"seed": 5', '"seed": 6'),
        text[:-20],
        "[]",
        "{}",
        text.replace("sha256", "sha255"),
        text.replace("ffff", "fffe"),
    ):
        path.write_text(changed)
        refused(tmp_path, str(path), "altered")
    path.write_text(text)
    check(tmp_path, 7)


def test_a_newer_version(tmp_path):
    path = save(tmp_path, 7, DENSE, TABLES, META).path
    text = path.read_text()
    path.write_text(text.replace('"version": 2', '"version": 3'))
    refused(tmp_path, str(path), "format version 3", "reads version 2", "wrote it or a newer one")
    path.write_text(text.replace('"version": 2', '"version": 1'))
    assert "or a newer one" not in refused(tmp_path, str(path), "format version 1", "use the tritonrec that")


def test_a_manifest_that_names_another_file_is_refused(tmp_path):
    """Whole by its checksum, and yet not what a save writes."""
    path = save(tmp_path, 7, DENSE, TABLES, META).path
    body = read_manifest(path)
    del body["manifest_sha256"]
    body["dense"]["file"] = "step-000000000007/../../secret.0123456789abcdef.safetensors"
    path.write_text(json.dumps(add_checksum(body)))
    refused(tmp_path, str(path), "names a file that no save writes", "secret")
    body["dense"]["file"] = names(tmp_path)[-2]
    assert ".safetensors" in names(tmp_path)[-2]
    body["tables"]["items"]["columns"]["rows"] = ["float32", [6]]
    path.write_text(json.dumps(add_checksum(body)))
    refused(tmp_path, str(content(tmp_path, 7)), "but the manifest says", "[3, 6]")


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
    refused(tmp_path, f"{path} is missing, but the manifest names it")
    path.mkdir()
    refused(tmp_path, f"{path} cannot be read", "Is a directory")


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, limited_files):
    small = {"w": torch.arange(5)}
    save(tmp_path, 1, small, {}, {})
    before = names(tmp_path)
    refusal = r"step-000000000002\.json could not be written: .*{}.*File too large.*untouched"
    large = {"keys": torch.arange(500)}
    for dense, tables, meta, file in [
        ({"w": torch.arange(5000)}, {}, {}, r"\.partial-dense"),
        (small, {"t": large}, {}, r"\.partial-t\.0000-ffff"),
        (small, {}, {"long": "x" * 2000}, ""),
    ]:
        with limited_files(1024), pytest.raises(CheckpointError, match=refusal.format(file)):
            save(tmp_path, 2, dense, tables, meta)
        assert names(tmp_path) == before
        check(tmp_path, 1, small, {}, {})


def test_leftovers_make_room_before_a_save(tmp_path):
    leftover = tmp_path / "step-000000000001" / "dense.0123456789abcdef.safetensors"
    leftover.parent.mkdir()
    leftover.write_bytes(b"half of it")
    original = files.publish

    def looks(partial: Path, path: Path) -> None:
        assert not leftover.exists()
        original(partial, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "publish", looks)
        save(tmp_path, 2, {"w": torch.arange(5)}, {}, {})


@pytest.mark.parametrize("call", ["mkdir", "replace", "open"])
def test_a_directory_that_may_not_be_written(tmp_path, monkeypatch, call):
    """As root every directory may be: the system's refusal stands in, at each call that it could meet."""
    save(tmp_path, 1, DENSE, TABLES, META)
    original = getattr(os, call)

    def refuse(path, *arguments, **options):
        if "step-000000000002" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(CheckpointError, match=r"Permission denied: '.*step-000000000002.*untouched"):
            save(tmp_path, 2, DENSE, TABLES, META)
    check(tmp_path, 1)
    assert not list(tmp_path.rglob("*step-000000000002*"))


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "place").write_text("mine")
    with pytest.raises(CheckpointError, match=r"File exists: '.*place'"):
        save(tmp_path / "place", 1, DENSE, TABLES, META)
    assert (tmp_path / "place").read_text() == "mine"


@pytest.mark.parametrize("replaced", [False, True], ids=["new_step", "same_step"])
@pytest.mark.parametrize("call", ["fsync", "replace", "unlink", "rmdir"])
def test_a_failure_at_any_moment_leaves_a_whole_checkpoint(tmp_path, monkeypatch, call, replaced):
    """Fail the first, second, ... call until a save goes through: the old or new state is there."""
    tables = {"t": {"keys": torch.arange(3)}}
    old, new = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    step = 2 if replaced else 3
    original = getattr(os, call)
    outcomes = []
    while not outcomes or not outcomes[-1].startswith("all"):
        directory = tmp_path / str(len(outcomes))
        save(directory, 1, old, tables, {})
        save(directory, 2, old, tables, {})
        calls = 0

        def failing(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == len(outcomes) + 1:
                raise OSError(28, "No space left on device")
            return original(*arguments, **options)

        monkeypatch.setattr(os, call, failing)
        try:
            save(directory, step, new, tables, {})
            outcomes.append("all" if calls <= len(outcomes) else "saved")
        except CheckpointError as error:
            assert "No space left" in str(error)
            outcomes.append("failed")
        monkeypatch.setattr(os, call, original)
        found = load(directory).dense["w"].tolist()
        # The last flush is that of the manifest's name, which other processes see already.
        published = outcomes[-1] != "failed" or (call == "fsync" and len(outcomes) == 5)
        assert found == (new if published else old)["w"].tolist()
        assert all(load(directory, step=at).step == at for at in checkpoint.steps(directory)[-2:])
        save(directory, step, new, tables, {})
        assert load(directory).dense["w"].tolist() == [1] * 3
        assert len(names(directory)) == 2 * 3
    failed = {"fsync": 5, "replace": 3, "unlink": 0, "rmdir": 0}[call]
    assert outcomes[:failed] == ["failed"] * failed
    assert set(outcomes[failed:-1]) <= {"saved"}


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
        (dict(tables={"t": {"rows": torch.zeros(2, 2)}}), r"table 't' must have a column 'keys' .*got None"),
        (dict(tables={"t": {"keys": torch.zeros(2)}}), r"'keys' \(n,\) int64, got \(2,\) torch.float32"),
        (
            dict(tables={"t": {"keys": torch.arange(3), "rows": torch.zeros(2, 2)}}),
            r"column 'rows' of table 't' must have 3 rows .*\(2, 2\)",
        ),
        (
            dict(tables={"t": {"keys": torch.arange(1), "rows": torch.tensor(1)}}),
            r"column 'rows' of table 't' must have 1 rows .*\(\)",
        ),
        (
            dict(tables={"t": {"keys": torch.arange(2), "erased": torch.arange(2)}}),
            "must not have a column 'erased'",
        ),
        (dict(tables={"t": {"keys": torch.tensor([4, 7, 4])}}), "table 't': key 4 occurs more than once"),
    ],
)
def test_bad_arguments_are_named(tmp_path, changes, message):
    arguments = dict(step=1, dense=DENSE, tables=TABLES, meta=META) | changes
    with pytest.raises(ValueError, match=message):
        save(tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []
