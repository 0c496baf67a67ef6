"""The manifest of a checkpoint: its checksum, and every promise that its content makes about the files."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch

from . import slices
from .files import CheckpointError, folder_of, in_words, manifest_of, size_of

VERSION = 2
FORMAT = "tritonrec-checkpoint"

ERASED = "erased"
"""Column of the keys that went since the layer below."""

RESERVED = (ERASED, "__metadata__")
"""Names that no column of a table can have."""

MAX_MANIFEST_BYTES = 1 << 30
"""No save writes a longer manifest, and no load reads one: Python's JSON takes ten times as much memory."""

MAX_HEADER_BYTES = 100_000_000 + 8
"""The longest header that safetensors reads, and its length."""

CONTENT = re.compile(r"step-\d{12}/[\w.-]+\.[0-9a-f]{16}\.safetensors")

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_KEYS = {"format", "version", "step", "world_size", "dense", "tables", "meta"}
_FILE_KEYS = {"file", "bytes", "sha256"}
_PART_KEYS = {*_FILE_KEYS, "begin", "end", "rank", "rows", ERASED}


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` and the checksum that finds a change in it."""
    return {**body, "manifest_sha256": _sha256_of(body)}


def read_manifest(path: Path, advice: str = "") -> dict[str, Any]:
    """The manifest at `path`, checked: its checksum, its step, all that it says of tables and files.

    CheckpointError names `path` and ends in `advice`.
    """
    try:
        size = size_of(path)
        if size > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{path} was altered: it has {size} bytes, and no manifest more than {MAX_MANIFEST_BYTES}"
                f"{advice}"
            )
        manifest = json.loads(path.read_bytes())
        version = manifest["version"]
        written = manifest.get("manifest_sha256")
        body = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
        digest = _sha256_of(body)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing{advice}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}{advice}") from error
    except RecursionError as error:
        raise CheckpointError(
            f"{path} is not a manifest, or was altered: it is nested too deeply{advice}"
        ) from error
    except MemoryError as error:
        raise CheckpointError(
            f"{path} cannot be read: its {size} bytes of JSON take more memory than there is{advice}"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a manifest, or was altered: {in_words(error)}{advice}"
        ) from error
    if not _is_number(version) or version != VERSION:
        newer = _is_number(version) and version > VERSION
        raise CheckpointError(
            f"{path} has format version {version!r}, and this tritonrec reads version {VERSION}: "
            f"use the tritonrec that wrote it{' or a newer one' if newer else ''}{advice}"
        )
    if written != digest:
        raise CheckpointError(f"{path} was altered: its own checksum does not fit{advice}")
    step = body.get("step")
    if _is_number(step) and manifest_of(path.parent, step).name != path.name:
        raise CheckpointError(
            f"{path} holds step {step}, not the step it is named after: it was copied or renamed; "
            f"give it back the name {manifest_of(path.parent, step).name}{advice}"
        )
    try:
        _check(body)
    except _Flaw as flaw:
        raise CheckpointError(f"{path}: {flaw}{advice}") from None
    return manifest


def files_of(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Entries of all files that a manifest names."""
    yield body["dense"]
    for table in body["tables"].values():
        for layer in table["layers"]:
            yield from (part for part in layer["parts"] if part["file"])


def first_missing(directory: Path, body: Mapping[str, Any]) -> str | None:
    """The first file of a manifest that is not there with the length that was written, in words."""
    for entry in files_of(body):
        path = directory / entry["file"]
        try:
            size = size_of(path)
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {error}"
        if size != entry["bytes"]:
            return f"{path} has {size} bytes, but {entry['bytes']} were written"
    return None


def label_of(table: str, part: slices.Range) -> str:
    """How the name of a part's file begins: the table in harmless letters, first and last slice."""
    first, last = slices.slices_of(part)
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', table)[:40]}.{first:04x}-{last:04x}"


class _Flaw(Exception):
    """What is wrong with the content of a manifest, in words."""


def _demand(condition: object, words: str) -> None:
    if not condition:
        raise _Flaw(words)


def _is_number(value: object) -> TypeGuard[int]:
    """Whether JSON has it as a whole number; True is none."""
    return type(value) is int


def _is_dict(value: object, keys: set[str]) -> bool:
    return type(value) is dict and value.keys() == keys


def _check(body: dict[str, Any]) -> None:
    """Raise `_Flaw` unless a save can have written `body`."""
    _demand(body.keys() == _KEYS and body["format"] == FORMAT, f"it is no {FORMAT} with {sorted(_KEYS)}")
    step, world_size = body["step"], body["world_size"]
    _demand(_is_number(step) and 0 <= step < 10**12, f"step must be in [0, 10**12), got {step!r}")
    _check_world_size(world_size, "it")
    _demand(type(body["meta"]) is dict, f"meta must be an object, got {type(body['meta']).__name__}")
    _demand(_is_dict(body["dense"], _FILE_KEYS), f"dense must have {sorted(_FILE_KEYS)}")
    _check_file(body["dense"], step, "dense", 0, "dense")
    _demand(type(body["tables"]) is dict, f"tables must be an object, got {type(body['tables']).__name__}")

    histories = {}
    for name, table in body["tables"].items():
        where = f"table {name!r}"
        _demand(_is_dict(table, {"columns", "layers"}), f"{where} must have columns and layers")
        row_bytes = _check_columns(table["columns"], where)
        _demand(type(table["layers"]) is list and table["layers"], f"{where} must have a list of layers")
        for number, layer in enumerate(table["layers"]):
            _check_layer(layer, name, row_bytes, number == 0)
        histories[name] = [(layer["step"], layer["world_size"]) for layer in table["layers"]]
    for name, history in histories.items():
        first = next(iter(histories.values()))
        _demand(
            history == first, f"table {name!r} has layers of steps and world sizes {history}, others {first}"
        )
        at = [step for step, _ in history]
        _demand(at == sorted(set(at)), f"the layers of table {name!r} are of steps {at}, which must ascend")
        _demand(
            history[-1] == (step, world_size),
            f"the newest layer of table {name!r} is of step and world size {history[-1]}, the manifest of "
            f"{(step, world_size)}",
        )
    named = [entry["file"] for entry in files_of(body)]
    (file, times), *_ = Counter(named).most_common(1)
    _demand(times == 1, f"it names {file!r} {times} times")


def _check_world_size(world_size: object, where: str) -> None:
    _demand(
        _is_number(world_size) and 1 <= world_size < 1 << 31,
        f"the world size of {where} must be in [1, 2**31), got {world_size!r}",
    )


def _check_columns(columns: object, where: str) -> int:
    """Bytes of a row of a table with these columns."""
    _demand(type(columns) is dict and columns, f"{where} must have columns")
    assert isinstance(columns, dict)
    row_bytes = 0
    for column, kind in columns.items():
        what = f"column {column!r} of {where}"
        _demand(column not in RESERVED, f"{what} has a name with a meaning")
        _demand(type(kind) is list and len(kind) == 2, f"{what} must be [dtype, shape], got {kind!r}")
        dtype, shape = kind
        _demand(type(dtype) is str and dtype in _DTYPES, f"{what} has no dtype of torch: {dtype!r}")
        _demand(
            type(shape) is list
            and len(shape) <= 64
            and all(_is_number(size) and 0 <= size < 1 << 62 for size in shape),
            f"{what} must have a shape of at most 64 whole numbers, got {shape!r}",
        )
        width = prod(max(size, 1) for size in shape) * _DTYPES[dtype].itemsize
        _demand(width < 1 << 62, f"{what} has rows of {width} bytes")
        row_bytes += prod(shape) * _DTYPES[dtype].itemsize
    _demand(columns.get("keys") == ["int64", []], f"{where} must have keys of [int64, []]")
    return row_bytes


def _check_layer(layer: object, name: str, row_bytes: int, first: bool) -> None:
    where = f"table {name!r}"
    _demand(
        _is_dict(layer, {"step", "world_size", "parts"}),
        f"a layer of {where} must have step, world_size, parts",
    )
    assert isinstance(layer, dict)
    _demand(_is_number(layer["step"]), f"a layer of {where} is of step {layer['step']!r}")
    where = f"{where}, layer of step {layer['step']}"
    _check_world_size(layer["world_size"], where)
    parts = layer["parts"]
    _demand(
        type(parts) is list and all(_is_dict(part, _PART_KEYS) for part in parts),
        f"{where}: parts must be a list of entries with {sorted(_PART_KEYS)}",
    )
    for part in parts:
        for key in ("begin", "end", "rank", "rows", ERASED, "bytes"):
            _demand(_is_number(part[key]) and part[key] >= 0, f"{where}: {key} of a part is {part[key]!r}")
        _demand(
            part["begin"] < part["end"] <= slices.PLACES,
            f"{where}: a part reaches from {part['begin']} to {part['end']}",
        )
    flaw = slices.first_flaw([(part["begin"], part["end"]) for part in parts])
    _demand(flaw is None, f"{where}: {flaw}")
    for part in parts:
        _check_part(part, layer, name, row_bytes, first, where)


def _check_part(
    part: dict[str, Any], layer: dict[str, Any], name: str, row_bytes: int, first: bool, where: str
) -> None:
    place, rank, world_size = (part["begin"], part["end"]), part["rank"], layer["world_size"]
    where = f"{where}, part of places {place[0]} to {place[1]}"
    owned = slices.range_of(rank, world_size) if rank < world_size else (0, 0)
    _demand(
        owned[0] <= place[0] and place[1] <= owned[1], f"{where}: rank {rank} of {world_size} does not own it"
    )
    _demand(not (first and part[ERASED]), f"{where}: {part[ERASED]} keys are erased, and nothing is below")
    if part["rows"] or part[ERASED]:
        _check_file(
            part, layer["step"], label_of(name, place), part["rows"] * row_bytes + 8 * part[ERASED], where
        )
    else:
        entry = (part["file"], part["bytes"], part["sha256"])
        _demand(entry == (None, 0, None), f"{where}: a part without rows and erased keys has file {entry}")


def _check_file(entry: dict[str, Any], step: int, label: str, payload: int, where: str) -> None:
    file, size, digest = entry["file"], entry["bytes"], entry["sha256"]
    _demand(
        type(file) is str and CONTENT.fullmatch(file), f"{where} names a file that no save writes: {file!r}"
    )
    _demand(type(digest) is str and re.fullmatch("[0-9a-f]{64}", digest), f"{where}: {digest!r} is no sha256")
    expected = f"{folder_of(step)}/{label}.{digest[:16]}.safetensors"
    _demand(file == expected, f"{where} names file {file!r}, where {expected!r} was written")
    _demand(_is_number(size) and size >= payload, f"{where}: {file} of {size!r} bytes cannot hold {payload}")
    _demand(
        label == "dense" or size <= payload + MAX_HEADER_BYTES,
        f"{where}: {file} of {size} bytes has more than the {payload} of its rows and a header",
    )


def _sha256_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
