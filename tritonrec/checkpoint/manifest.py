"""The manifest of a checkpoint: its checksum, and checks of its entries about tables and files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, TypeGuard

import torch

from ..files.places import Place
from . import slices
from .files import CheckpointError, describe, folder_of, manifest_of, size_of

VERSION = 2
FORMAT = "tritonrec-checkpoint"

ERASED = "erased"
"""Column of the keys erased since the layer below."""

RESERVED = (ERASED, "__metadata__")
"""Names that a column of a table cannot have."""

MAX_MANIFEST_BYTES = 1 << 30
"""Longest manifest that is written or read: Python's JSON takes ten times as much memory."""

MAX_HEADER_BYTES = 100_000_000 + 8
"""Longest header that safetensors reads, including the 8 bytes of its length."""

CONTENT = re.compile(r"step-\d{12}/[\w.-]+\.[0-9a-f]{16}\.safetensors")

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_KEYS = {"format", "version", "step", "world_size", "dense", "tables", "meta"}
_FILE_KEYS = {"file", "bytes", "sha256"}
_PART_KEYS = {*_FILE_KEYS, "begin", "end", "rank", "rows", ERASED}


def add_checksum(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` with its checksum."""
    return {**body, "manifest_sha256": _sha256_of(body)}


def read_manifest(path: Place, advice: str = "") -> dict[str, Any]:
    """Read the manifest at `path`, and check its checksum, step, and entries of tables and files.

    Raises CheckpointError, which names `path` and ends with `advice`.
    """
    try:
        size = size_of(path)
        if size > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{path} was altered: it has {size} bytes, and a manifest has at most {MAX_MANIFEST_BYTES}"
                f"{advice}"
            )
        manifest = json.loads(path.read_bytes())
        version = manifest["version"]
        written = manifest.get("manifest_sha256")
        # The checksum is of everything else, and is compared before any entry is believed.
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
            f"{path} is not a manifest, or was altered: {describe(error)}{advice}"
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
    except _InvalidManifest as problem:
        raise CheckpointError(f"{path}: {problem}{advice}") from None
    return manifest


def files_of(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Entries of all files of a manifest."""
    yield body["dense"]
    for table in body["tables"].values():
        for layer in table["layers"]:
            yield from (part for part in layer["parts"] if part["file"])


def first_missing(directory: Place, body: Mapping[str, Any]) -> str | None:
    """An error about the first file of a manifest that is missing or has another length, or None."""
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
    """Prefix of the name of a part's file: table name in safe characters, first and last slice."""
    first, last = slices.slices_of(part)
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', table)[:40]}.{first:04x}-{last:04x}"


class _InvalidManifest(Exception):
    """An error in the content of a manifest."""


def _require(condition: object, words: str) -> None:
    if not condition:
        raise _InvalidManifest(words)


def _is_number(value: object) -> TypeGuard[int]:
    """Whether `value` is a JSON integer; True is not."""
    return type(value) is int


def _is_dict(value: object, keys: set[str]) -> bool:
    return type(value) is dict and value.keys() == keys


def _check(body: dict[str, Any]) -> None:
    """Raise `_InvalidManifest` for a `body` that no save writes."""
    _require(body.keys() == _KEYS and body["format"] == FORMAT, f"it is no {FORMAT} with {sorted(_KEYS)}")
    step, world_size = body["step"], body["world_size"]
    _require(_is_number(step) and 0 <= step < 10**12, f"step must be in [0, 10**12), got {step!r}")
    _check_world_size(world_size, "it")
    _require(type(body["meta"]) is dict, f"meta must be an object, got {type(body['meta']).__name__}")
    _require(_is_dict(body["dense"], _FILE_KEYS), f"dense must have {sorted(_FILE_KEYS)}")
    _check_file(body["dense"], step, "dense", 0, "dense")
    _require(type(body["tables"]) is dict, f"tables must be an object, got {type(body['tables']).__name__}")

    histories = {}
    for name, table in body["tables"].items():
        where = f"table {name!r}"
        _require(_is_dict(table, {"columns", "layers"}), f"{where} must have columns and layers")
        row_bytes = _check_columns(table["columns"], where)
        _require(type(table["layers"]) is list and table["layers"], f"{where} must have a list of layers")
        for number, layer in enumerate(table["layers"]):
            _check_layer(layer, name, row_bytes, number == 0)
        histories[name] = [(layer["step"], layer["world_size"]) for layer in table["layers"]]
    for name, history in histories.items():
        first = next(iter(histories.values()))
        # One save writes a layer of every table.
        _require(
            history == first, f"table {name!r} has layers of steps and world sizes {history}, others {first}"
        )
        at = [step for step, _ in history]
        _require(at == sorted(set(at)), f"the layers of table {name!r} are of steps {at}, which must ascend")
        _require(
            history[-1] == (step, world_size),
            f"the newest layer of table {name!r} is of step and world size {history[-1]}, the manifest of "
            f"{(step, world_size)}",
        )


def _check_world_size(world_size: object, where: str) -> None:
    _require(
        _is_number(world_size) and 1 <= world_size < 1 << 31,
        f"the world size of {where} must be in [1, 2**31), got {world_size!r}",
    )


def _check_columns(columns: object, where: str) -> int:
    """Bytes of a row of a table with these columns."""
    _require(type(columns) is dict and columns, f"{where} must have columns")
    assert isinstance(columns, dict)
    row_bytes = 0
    for column, kind in columns.items():
        what = f"column {column!r} of {where}"
        _require(column not in RESERVED, f"{what} has a reserved name")
        _require(type(kind) is list and len(kind) == 2, f"{what} must be [dtype, shape], got {kind!r}")
        dtype, shape = kind
        _require(type(dtype) is str and dtype in _DTYPES, f"{what} must have a dtype of torch, got {dtype!r}")
        _require(
            type(shape) is list
            and len(shape) <= 64
            and all(_is_number(size) and 0 <= size < 1 << 62 for size in shape),
            f"{what} must have a shape of at most 64 whole numbers, got {shape!r}",
        )
        # A size of 0 must not hide one that is absurd.
        width = prod(max(size, 1) for size in shape) * _DTYPES[dtype].itemsize
        _require(width < 1 << 62, f"{what} has rows of {width} bytes")
        row_bytes += prod(shape) * _DTYPES[dtype].itemsize
    _require(columns.get("keys") == ["int64", []], f"{where} must have keys of [int64, []]")
    return row_bytes


def _check_layer(layer: object, name: str, row_bytes: int, first: bool) -> None:
    where = f"table {name!r}"
    _require(
        _is_dict(layer, {"step", "world_size", "parts"}),
        f"a layer of {where} must have step, world_size, parts",
    )
    assert isinstance(layer, dict)
    _require(_is_number(layer["step"]), f"a layer of {where} is of step {layer['step']!r}")
    where = f"{where}, layer of step {layer['step']}"
    _check_world_size(layer["world_size"], where)
    parts = layer["parts"]
    _require(
        type(parts) is list and all(_is_dict(part, _PART_KEYS) for part in parts),
        f"{where}: parts must be a list of entries with {sorted(_PART_KEYS)}",
    )
    for part in parts:
        for key in ("begin", "end", "rank", "rows", ERASED, "bytes"):
            _require(_is_number(part[key]) and part[key] >= 0, f"{where}: {key} of a part is {part[key]!r}")
        _require(
            part["begin"] < part["end"] <= slices.PLACES,
            f"{where}: a part reaches from {part['begin']} to {part['end']}",
        )
    problem = slices.tiling_error([(part["begin"], part["end"]) for part in parts])
    _require(problem is None, f"{where}: {problem}")
    for part in parts:
        _check_part(part, layer, name, row_bytes, first, where)


def _check_part(
    part: dict[str, Any], layer: dict[str, Any], name: str, row_bytes: int, first: bool, where: str
) -> None:
    place, rank, world_size = (part["begin"], part["end"]), part["rank"], layer["world_size"]
    where = f"{where}, part of places {place[0]} to {place[1]}"
    owned = slices.range_of(rank, world_size) if rank < world_size else (0, 0)
    _require(
        owned[0] <= place[0] and place[1] <= owned[1], f"{where}: rank {rank} of {world_size} does not own it"
    )
    _require(not (first and part[ERASED]), f"{where}: {part[ERASED]} keys are erased, and nothing is below")
    if part["rows"] or part[ERASED]:
        _check_file(
            part, layer["step"], label_of(name, place), part["rows"] * row_bytes + 8 * part[ERASED], where
        )
    else:
        entry = (part["file"], part["bytes"], part["sha256"])
        _require(entry == (None, 0, None), f"{where}: a part without rows and erased keys has file {entry}")


def _check_file(entry: dict[str, Any], step: int, label: str, payload: int, where: str) -> None:
    file, size, digest = entry["file"], entry["bytes"], entry["sha256"]
    _require(
        type(file) is str and CONTENT.fullmatch(file), f"{where} names a file that no save writes: {file!r}"
    )
    _require(
        type(digest) is str and re.fullmatch("[0-9a-f]{64}", digest), f"{where}: {digest!r} is no sha256"
    )
    expected = f"{folder_of(step)}/{label}.{digest[:16]}.safetensors"
    _require(file == expected, f"{where} names file {file!r}, where {expected!r} was written")
    _require(_is_number(size) and size >= payload, f"{where}: {file} of {size!r} bytes cannot hold {payload}")
    _require(
        label == "dense" or size <= payload + MAX_HEADER_BYTES,
        f"{where}: {file} of {size} bytes has more than the {payload} of its rows and a header",
    )


def _sha256_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
