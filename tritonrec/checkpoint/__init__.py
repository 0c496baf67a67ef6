"""Checkpoints that are whole or not there: one safetensors file and one JSON manifest for a step.

::

    directory/
      step-000000000040.json                        the manifest: a checkpoint exists when this does
      step-000000000040-1c9f2a....safetensors       what it names, under a part of its own checksum
      step-000000000060.json
      step-000000000060-88b03e....safetensors

Both are written under another name, flushed to the disk and renamed, the manifest last, so a crash or a full
disk at any moment leaves the checkpoints before it as they were. The last two are kept. Nothing is pickled.

The file holds ``dense/NAME`` for dense tensors, ``keys/TABLE`` (n,) int64 and ``rows/TABLE`` (n, w) float32
for tables, where a row is its weights and optimizer state. One process writes into a directory at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

VERSION = 1
KEPT = 2

Tables = dict[str, tuple[Tensor, Tensor]]

_MANIFEST = re.compile(r"step-(\d{12})\.json")
_CONTENT = re.compile(r"(step-\d{12})-[0-9a-f]{16}\.safetensors")
_PARTIAL = ".partial-"  # prefix of names that are still being written


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or cannot be trusted; the message names the file."""


def save(
    directory: Path | str,
    step: int,
    dense: Mapping[str, Tensor],
    tables: Mapping[str, tuple[Tensor, Tensor]],
    meta: Mapping[str, Any],
) -> Path:
    """Write the state after `step` steps and return the path of its manifest.

    Args:
        directory: made if it is not there. Afterwards it holds this checkpoint and the latest one before.
        step: from 0 to 10**12 - 1, and not less than the last step saved there; the same step is replaced.
        dense: tensors of any dtype and shape.
        tables: for each table keys (n,) int64 and rows (n, w) float32.
        meta: anything that JSON gives back unchanged.
    Raises:
        ValueError: a shape, dtype or step out of range, or `meta` that JSON would change.
        CheckpointError: the files could not be written. What was there before still is.
    """
    directory = Path(directory)
    tensors = _named_tensors(dense, tables)
    try:
        unchanged = json.loads(json.dumps(meta, allow_nan=False)) == meta
    except (TypeError, ValueError) as error:
        raise ValueError(f"meta cannot be written as JSON: {error}") from error
    if not unchanged:
        raise ValueError("meta would be changed by JSON: keys must be strings, and sequences lists")
    if not 0 <= step < 10**12:
        raise ValueError(f"step must be in [0, 10**12), got {step}")
    later = [other for other in steps(directory) if other > step]
    if later:
        raise ValueError(
            f"{directory} holds step {max(later)} already, which is later than {step}: "
            "a run that starts again further back needs a directory of its own"
        )

    manifest = directory / f"step-{step:012d}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _prune(directory)  # leftovers of a failed save would take the room of this one
        partial = directory / f"{_PARTIAL}{step:012d}.safetensors"
        save_file(tensors, partial)
        digest = _sha256(partial)
        content = directory / f"step-{step:012d}-{digest[:16]}.safetensors"
        body = {
            "format": "tritonrec-checkpoint",
            "version": VERSION,
            "step": step,
            "file": content.name,
            "bytes": partial.stat().st_size,
            "sha256": digest,
            "tensors": {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()},
            "meta": dict(meta),
        }
        _publish(partial, content)
        partial = directory / f"{_PARTIAL}{step:012d}.json"
        partial.write_text(json.dumps({**body, "manifest_sha256": _body_sha256(body)}, indent=1) + "\n")
        _publish(partial, manifest)
    except (OSError, SafetensorError) as error:
        _remove(directory, lambda name: name.startswith(_PARTIAL))
        raise CheckpointError(
            f"{manifest} could not be written: {error}. The checkpoints before it are untouched"
        ) from error
    _prune(directory, content.name)
    return manifest


def load(
    directory: Path | str, step: int | None = None
) -> tuple[int, dict[str, Tensor], Tables, dict[str, Any]]:
    """``(step, dense, tables, meta)`` of the last checkpoint in `directory`, or of the given step.

    Every byte is checked against the manifest first. Raises CheckpointError, naming the file, when there is
    no checkpoint, a file is missing, shortened or altered, or a newer format wrote it.
    """
    directory = Path(directory)
    available = steps(directory)
    if step is None and not available:
        raise CheckpointError(f"{directory} holds no checkpoint")
    step = available[-1] if step is None else step
    others = [other for other in available if other != step]
    advice = f"; the directory also holds step {others[-1]}" if others else ""

    body = _read_manifest(directory / f"step-{step:012d}.json", advice)
    path = directory / body["file"]
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, but the manifest of step {step} names it{advice}")
    size = path.stat().st_size
    if size != body["bytes"]:
        raise CheckpointError(f"{path} has {size} bytes, but {body['bytes']} were written{advice}")
    digest = _sha256(path)
    if digest != body["sha256"]:
        raise CheckpointError(f"{path} was altered: its sha256 is {digest}, written {body['sha256']}{advice}")

    tensors = load_file(path)
    dense = {name[len("dense/") :]: tensor for name, tensor in tensors.items() if name.startswith("dense/")}
    names = [name[len("keys/") :] for name in tensors if name.startswith("keys/")]
    tables = {name: (tensors[f"keys/{name}"], tensors[f"rows/{name}"]) for name in names}
    return step, dense, tables, body["meta"]


def steps(directory: Path | str) -> list[int]:
    """Steps that have a manifest in `directory`, ascending; none if there is no such directory."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    matches = (_MANIFEST.fullmatch(name) for name in os.listdir(directory))
    return sorted(int(match[1]) for match in matches if match)


def _named_tensors(
    dense: Mapping[str, Tensor], tables: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Copies of all tensors under their names in the file: safetensors takes no views of one storage."""
    tensors = {f"dense/{name}": tensor for name, tensor in dense.items()}
    for name, (keys, rows) in tables.items():
        if keys.dim() != 1 or keys.dtype != torch.int64:
            raise ValueError(
                f"keys of table {name!r} must be (n,) int64, got {tuple(keys.shape)} {keys.dtype}"
            )
        if rows.dim() != 2 or rows.dtype != torch.float32 or len(rows) != len(keys):
            raise ValueError(
                f"rows of table {name!r} must be ({len(keys)}, w) float32, "
                f"got {tuple(rows.shape)} {rows.dtype}"
            )
        tensors[f"keys/{name}"], tensors[f"rows/{name}"] = keys, rows
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def _read_manifest(path: Path, advice: str) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
        version = manifest["version"]
        digest = manifest.pop("manifest_sha256") if version == VERSION else None
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing{advice}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is not a manifest, or was altered: {error!r}{advice}") from error
    if version != VERSION:
        raise CheckpointError(
            f"{path} has format version {version!r}, and this tritonrec reads version {VERSION}: "
            f"use the tritonrec that wrote it or a newer one{advice}"
        )
    if digest != _body_sha256(manifest):
        raise CheckpointError(f"{path} was altered: its own checksum does not fit{advice}")
    return manifest


def _publish(partial: Path, path: Path) -> None:
    """Flush `partial` to the disk, give it its name, and flush the name."""
    _flush(partial)
    os.replace(partial, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(directory: Path, newest: str = "") -> None:
    """Remove all but the last checkpoints, what `newest` replaces in its step, and what failed saves left."""
    saved = steps(directory)
    for step in saved[:-KEPT]:
        (directory / f"step-{step:012d}.json").unlink()
    kept = {f"step-{step:012d}" for step in saved[-KEPT:]}

    def is_stale(name: str) -> bool:
        match = _CONTENT.fullmatch(name)
        replaced = match is not None and newest.startswith(match[1]) and name != newest
        return name.startswith(_PARTIAL) or (match is not None and (match[1] not in kept or replaced))

    _remove(directory, is_stale)


def _remove(directory: Path, chosen: Callable[[str], bool]) -> None:
    if directory.is_dir():
        for name in filter(chosen, os.listdir(directory)):
            (directory / name).unlink()


def _body_sha256(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
