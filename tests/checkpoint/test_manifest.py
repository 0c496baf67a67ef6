"""A manifest is refused by name where it is that of another step, or says what no save can have written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from simulated import ascending, load_on, random_table, same, save_on, whole

from tritonrec.checkpoint import CheckpointError, load, save, writer
from tritonrec.checkpoint import manifest as manifest_module
from tritonrec.checkpoint.files import manifest_of
from tritonrec.checkpoint.manifest import add_checksum, read_manifest


def refused(directory: Path, *parts: str, step: int | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(directory, step)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    return str(caught.value)


def chain(directory: Path) -> list[dict[str, torch.Tensor]]:
    """Steps 20 and 40 of two ranks, the second an incremental one; the table after each."""
    table = random_table(31, 60)
    base = save_on(2, directory, 20, {"t": table}, dense={"w": torch.ones(2)}, meta={"a": 20})[0]
    changed = {column: values[:9] for column, values in table.items()} | {"rows": table["rows"][:9] * 2}
    gone = table["keys"][9:15]
    save_on(
        2,
        directory,
        40,
        {"t": changed},
        dense={"w": torch.zeros(2)},
        meta={"a": 40},
        base=base,
        erased={"t": gone},
    )
    return [table, {column: torch.cat([changed[column], values[15:]]) for column, values in table.items()}]


def test_a_manifest_under_the_name_of_another_step_is_refused(tmp_path):
    first, second = chain(tmp_path)
    for copied, step in ((20, 99), (40, 99), (20, 10)):
        shutil.copy(manifest_of(tmp_path, copied), manifest_of(tmp_path, step))
        words = f"step-{step:012d}.json holds step {copied}, not the step it is named after"
        refused(tmp_path, words, f"step-{copied:012d}.json", step=step)
        manifest_of(tmp_path, step).unlink()
    shutil.copy(manifest_of(tmp_path, 20), manifest_of(tmp_path, 99))
    refused(tmp_path, "holds step 20", "also holds step 40")
    manifest_of(tmp_path, 99).unlink()
    assert same(whole(load_on(3, tmp_path), "t"), ascending(second))
    assert same(whole(load_on(3, tmp_path, step=20), "t"), ascending(first))


def test_swapped_manifests_are_refused_and_no_base(tmp_path):
    chain(tmp_path)
    paths = [manifest_of(tmp_path, step) for step in (20, 40)]
    texts = [path.read_bytes() for path in paths]
    for path, text in zip(paths, reversed(texts), strict=True):
        path.write_bytes(text)
    refused(tmp_path, "step-000000000040.json holds step 20", step=40)
    refused(tmp_path, "step-000000000020.json holds step 40", step=20)
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)

    table = random_table(32, 20)
    base = save_on(1, tmp_path / "other", 20, {"t": table})[0]
    save_on(1, tmp_path / "elsewhere", 30, {"t": table})
    shutil.copy(manifest_of(tmp_path / "elsewhere", 30), manifest_of(tmp_path / "other", 20))
    with pytest.raises(CheckpointError, match=r"step-000000000020\.json holds step 30"):
        save_on(1, tmp_path / "other", 40, {"t": table}, base=base, erased={})


@pytest.mark.parametrize(
    "text, words",
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"\xff\xfe\x00\xd8", "was altered"),
        (b'"\xff' + b" " * 100_000, "UnicodeDecodeError"),
        (b'"\\ud800"', "was altered"),
        (b"9" * 10_000, "was altered"),
        (b"\0" * 1000, "was altered"),
        (b"", "was altered"),
        (b'{"version": 2, "manifest_sha256": NaN}', "was altered"),
        (b'{"version": true}', "format version True"),
        (b'{"version": 2.0}', "format version 2.0"),
    ],
)
def test_what_is_no_manifest_is_refused_by_name(tmp_path, text, words):
    path = save(tmp_path, 7, {}, {}, {}).path
    path.write_bytes(text)
    assert len(refused(tmp_path, str(path), words)) < 1000
    save(tmp_path, 8, {}, {}, {})
    assert load(tmp_path).step == 8


def test_files_grown_beyond_the_memory_are_refused_before_they_are_read(tmp_path):
    """A terabyte of zeros, as a disk holds it for nothing; the memory of this process has a limit."""
    table = random_table(33, 20)
    path = save(tmp_path, 7, {"w": torch.ones(3)}, {"t": table}, {}).path
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    try:
        for file in (path, *(tmp_path / "step-000000000007").iterdir()):
            size = file.stat().st_size
            os.truncate(file, 1 << 40)
            refused(tmp_path, str(file), f"has {1 << 40} bytes")
            os.truncate(file, size)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert same(load(tmp_path).tables["t"], ascending(table))


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    path = save(tmp_path, 7, {"w": torch.ones(3)}, {}, {}).path
    for file in (path, *(tmp_path / "step-000000000007").iterdir()):
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        refused(tmp_path, str(file), "cannot be read", "not a regular file")
        file.unlink()
        file.write_bytes(content)
    assert load(tmp_path).step == 7


def test_a_manifest_longer_than_what_is_read_is_not_written(tmp_path, monkeypatch):
    save(tmp_path, 1, {}, {}, {"a": "x" * 5000})
    for module in (manifest_module, writer):
        monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 5000)
    refused(tmp_path, "step-000000000001.json", "a manifest has at most 5000")
    with pytest.raises(CheckpointError, match=r"step-000000000002\.json .*more than 5000"):
        save(tmp_path, 2, {}, {}, {"a": "x" * 5000})


def test_meta_nested_beyond_what_json_holds_is_named(tmp_path):
    meta: dict = {}
    for _ in range(100_000):
        meta = {"a": meta}
    with pytest.raises(ValueError, match="meta cannot be written as JSON"):
        save(tmp_path, 1, {}, {}, meta)


def resealed(directory: Path, step: int, change: Callable[[dict], None]) -> Path:
    """Change a manifest and give it the checksum that fits."""
    path = manifest_of(directory, step)
    body = read_manifest(path)
    del body["manifest_sha256"]
    change(body)
    path.write_text(json.dumps(add_checksum(body)))
    return path


def layer(body: dict, number: int = -1) -> dict:
    return body["tables"]["t"]["layers"][number]


def without_rows(layer: dict) -> dict:
    nothing = {"rows": 0, "erased": 0, "file": None, "bytes": 0, "sha256": None}
    return layer | {"parts": [part | nothing for part in layer["parts"]]}


def at(place: str, **changes: object) -> Callable[[dict], None]:
    """A change of some keys in a place of the manifest."""

    def change(body: dict) -> None:
        places = {"body": body, "dense": body["dense"], "table": body["tables"]["t"]}
        places |= {"columns": body["tables"]["t"]["columns"], "base": layer(body, 0), "layer": layer(body)}
        places |= {"left": layer(body)["parts"][0], "right": layer(body)["parts"][1]}
        (places | {"base_left": layer(body, 0)["parts"][0]})[place].update(changes)

    return change


def swap_parts(body: dict, *keys: str) -> None:
    left, right = layer(body)["parts"]
    for key in keys:
        left[key], right[key] = right[key], left[key]


CHANGES: dict[str, tuple[Callable[[dict], object], str]] = {
    "step_text": (at("body", step="40"), r"step must be in .*got '40'"),
    "step_true": (at("body", step=True), "step must be in .*got True"),
    "step_large": (at("body", step=10**12), "holds step 1000000000000, not"),
    "step_other": (at("body", step=41), "holds step 41, not the step it is named after"),
    "world_size": (at("body", world_size=3), "world size .40, 2., the manifest of .40, 3."),
    "world_size_0": (at("body", world_size=0), "world size of it must be in .*got 0"),
    "format": (at("body", format="pickle"), "is no tritonrec-checkpoint"),
    "more": (at("body", more=1), "is no tritonrec-checkpoint"),
    "no_meta": (lambda body: body.pop("meta"), "is no tritonrec-checkpoint"),
    "meta_list": (at("body", meta=[]), "meta must be an object, got list"),
    "tables_list": (at("body", tables=[]), "tables must be an object, got list"),
    "table_none": (lambda body: body["tables"].update(t=None), "table 't' must have columns and layers"),
    "table_renamed": (lambda body: body["tables"].update(u=body["tables"].pop("t")), "'u'.* names file"),
    "table_alias": (lambda body: body["tables"].update({"t ": body["tables"]["t"]}), "table 't '"),
    "dense_none": (at("body", dense=None), "dense must have"),
    "dense_bytes": (at("dense", bytes="9"), "'9' bytes"),
    "dense_bytes_negative": (at("dense", bytes=-1), "-1 bytes"),
    "dense_sha": (at("dense", sha256=7), "7 is no sha256"),
    "dense_file": (at("dense", file=7), "names a file that no save writes: 7"),
    "dense_is_a_part": (
        lambda body: body.update(dense={key: layer(body)["parts"][0][key] for key in body["dense"]}),
        "dense names file",
    ),
    "no_columns": (at("table", columns={}), "table 't' must have columns"),
    "no_keys": (lambda body: body["tables"]["t"]["columns"].pop("keys"), "must have keys of"),
    "keys_float": (at("columns", keys=["float64", []]), "must have keys of"),
    "dtype": (at("columns", rows=["object", [3]]), "must have a dtype of torch, got 'object'"),
    "dtype_module": (at("columns", rows=["nn", [3]]), "must have a dtype of torch, got 'nn'"),
    "shape": (at("columns", rows=["float32", [3.0]]), "shape of at most"),
    "shape_negative": (at("columns", rows=["float32", [-3]]), "shape of at most"),
    "shape_large": (at("columns", rows=["float32", [2**62]]), "shape of at most"),
    "shape_huge": (at("columns", rows=["float32", [2**61] * 9]), "rows of"),
    "shape_none": (at("columns", rows=["float32", [0]]), "the manifest says"),
    "reserved": (at("columns", erased=["int64", []]), "a reserved name"),
    "another_width": (at("columns", rows=["float32", [4]]), "the manifest says"),
    "no_layers": (at("table", layers=[]), "must have a list of layers"),
    "top_layer_gone": (lambda body: body["tables"]["t"]["layers"].pop(), "newest layer of table 't'"),
    "base_gone": (lambda body: body["tables"]["t"]["layers"].pop(0), "keys are erased, and nothing is below"),
    "layers_swapped": (lambda body: body["tables"]["t"]["layers"].reverse(), "nothing is below"),
    "layer_twice": (lambda body: body["tables"]["t"]["layers"].insert(0, layer(body, 0)), "must ascend"),
    "layer_step_text": (at("base", step="20"), "a layer of table 't' is of step '20'"),
    "another_history": (
        lambda body: body["tables"].update(u=body["tables"]["t"] | {"layers": [without_rows(layer(body))]}),
        r"table 'u' has layers of steps and world sizes \[\(40, 2\)\], others \[\(20, 2\), \(40, 2\)\]",
    ),
    "layer_short": (lambda body: layer(body).pop("world_size"), "must have step, world_size, parts"),
    "layer_step": (at("base", step=19), "names file"),
    "layer_world_size": (at("base", world_size=3), "rank 0 of 3 does not own it"),
    "parts_none": (at("layer", parts=None), "parts must be a list"),
    "part_gone": (lambda body: layer(body)["parts"].pop(), "nothing holds slices 32768 to 65535"),
    "begin": (at("right", begin=2**31 + 1), "nothing holds slices 32768 to 32768"),
    "end": (at("right", end=2**40), "a part reaches from"),
    "end_infinite": (at("right", end=float("inf")), "end of a part is inf"),
    "rank": (at("right", rank=0), "rank 0 of 2 does not own it"),
    "rank_9": (at("right", rank=9), "rank 9 of 2 does not own it"),
    "rows_negative": (at("left", rows=-1), "rows of a part is -1"),
    "rows_fewer": (at("left", rows=1), "the manifest says"),
    "rows_none": (at("left", rows=0, erased=0), "without rows and erased keys"),
    "rows_many": (at("left", rows=2**62), "cannot hold"),
    "erased": (at("base_left", erased=1), "keys are erased, and nothing is below"),
    "bytes_many": (at("left", bytes=1 << 40), "more than the"),
    "bytes_none": (at("left", bytes=None), "bytes of a part is None"),
    "file_none": (at("left", file=None, bytes=0, sha256=None), "names a file that no"),
    "files_swapped": (lambda body: swap_parts(body, "file", "bytes", "sha256"), "names file"),
    "rows_swapped": (lambda body: swap_parts(body, "rows", "erased", "bytes"), "bytes"),
    "another_dtype": (at("columns", score=["uint8", []]), "the manifest says"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_whose_checksum_fits_is_refused_where_no_save_writes_it(tmp_path, name):
    change, words = CHANGES[name]
    chain(tmp_path)
    path = resealed(tmp_path, 40, change)
    with pytest.raises(CheckpointError) as caught:
        load_on(2, tmp_path)
    assert re.search(words, str(caught.value)), str(caught.value)
    assert str(path) in str(caught.value) or "step-000000000040/" in str(caught.value)
    assert "also holds step 20" in str(caught.value)


def test_a_file_of_another_part_is_refused_under_any_name(tmp_path):
    """The other rank's file, with its checksum in the manifest, under the name of this rank's slices."""
    chain(tmp_path)

    def change(body: dict) -> None:
        left, right = layer(body)["parts"]
        for key in ("bytes", "sha256", "rows", "erased"):
            left[key] = right[key]
        begin, _, _ = left["file"].rpartition(f".{left['file'].split('.')[-2]}")
        file = f"{begin}.{right['sha256'][:16]}.safetensors"
        shutil.copy(tmp_path / right["file"], tmp_path / file)
        left["file"] = file

    resealed(tmp_path, 40, change)
    refused(tmp_path, "step-000000000040/t.0000-7fff", "was written for", "the manifest has it for")


def file_of(header: object, payload: bytes = bytes(12)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


W = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
PART = {"part": "{}"}


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "its header has 0 bytes"),
        (b"\xff" * 8, "its header has"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "its header has 1048576 bytes, and it has 10"),
        (file_of(b"[" * 200_000), "RecursionError"),
        (file_of(b'{"\xff": 1}'), "UnicodeDecodeError"),
        (file_of([]), "AttributeError"),
        (file_of({"dense/w": W}), "KeyError"),
        (file_of({"dense/w": W, "__metadata__": {"part": None}}), "TypeError"),
        (file_of({"dense/w": W, "__metadata__": PART}, bytes(13)), "its header is that of"),
        (
            file_of({"dense/w": W | {"data_offsets": [0, 1 << 40]}, "__metadata__": PART}),
            "its header is that of",
        ),
        (file_of({"dense/w": W | {"data_offsets": [0, 12.0]}, "__metadata__": PART}), "SafetensorError"),
        (file_of({"dense/w": W | {"dtype": "X"}, "__metadata__": PART}), "SafetensorError"),
        (file_of({"dense/w": W | {"shape": [2**63, 2**63]}, "__metadata__": PART}), "SafetensorError"),
        (file_of({"dense/w": W, "__metadata__": {"part": '{"table": "t"}'}}), "it was written for"),
    ],
)
def test_a_tensor_file_whose_header_lies_is_refused_by_name(tmp_path, content, words):
    save(tmp_path, 7, {"w": torch.ones(3)}, {}, {})
    (old,) = (tmp_path / "step-000000000007").iterdir()

    def put(content: bytes) -> None:
        (path,) = (tmp_path / "step-000000000007").iterdir()
        digest = hashlib.sha256(content).hexdigest()
        file = f"step-000000000007/dense.{digest[:16]}.safetensors"
        path.write_bytes(content)
        path.rename(tmp_path / file)
        entry = {"file": file, "bytes": len(content), "sha256": digest}
        resealed(tmp_path, 7, lambda body: body.update(dense=entry))

    put(file_of({"dense/w": W, "__metadata__": PART}, old.read_bytes()[-12:]))
    assert load(tmp_path).dense["w"].tolist() == [1] * 3  # the same, made here
    put(content)
    refused(tmp_path, "step-000000000007/dense.", "was altered, or is no file of a checkpoint", words)
