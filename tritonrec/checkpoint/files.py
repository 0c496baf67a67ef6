"""Names, manifests and the order in which files come and go."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VERSION = 2
KEPT = 2

FORMAT = "tritonrec-checkpoint"
PARTIAL = ".partial-"  # prefix of names that are still being written

_MANIFEST = re.compile(r"step-(\d{12})\.json")
_FOLDER = re.compile(r"step-\d{12}")
_CONTENT = re.compile(r"step-\d{12}/[\w.-]+\.[0-9a-f]{16}\.safetensors")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or cannot be trusted; the message names the file."""


def folder_of(step: int) -> str:
    return f"step-{step:012d}"


def manifest_of(directory: Path, step: int) -> Path:
    return directory / f"{folder_of(step)}.json"


def steps(directory: Path | str) -> list[int]:
    """Steps that have a manifest in `directory`, ascending; none if there is no such directory."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    matches = (_MANIFEST.fullmatch(name) for name in os.listdir(directory))
    return sorted(int(match[1]) for match in matches if match)


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` and the checksum that finds a change in it."""
    return {**body, "manifest_sha256": _sha256_of_body(body)}


def read_manifest(path: Path, advice: str = "") -> dict[str, Any]:
    """The manifest at `path`, checked. CheckpointError ends in `advice`."""
    try:
        manifest = json.loads(path.read_bytes())
        version = manifest["version"]
        written = manifest.get("manifest_sha256")
        body = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing{advice}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}{advice}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a manifest, or was altered: {error!r}{advice}") from error
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        raise CheckpointError(
            f"{path} has format version {version!r}, and this tritonrec reads version {VERSION}: "
            f"use the tritonrec that wrote it{' or a newer one' if newer else ''}{advice}"
        )
    if written != _sha256_of_body(body):
        raise CheckpointError(f"{path} was altered: its own checksum does not fit{advice}")
    for entry in files_of(body):
        if not _CONTENT.fullmatch(entry["file"]):
            raise CheckpointError(f"{path} names a file that no save writes: {entry['file']!r}{advice}")
    return manifest


def files_of(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Entries of all files that a manifest names."""
    yield body["dense"]
    for table in body["tables"].values():
        for layer in table["layers"]:
            yield from (part for part in layer["parts"] if part["file"])


def publish(partial: Path, path: Path) -> None:
    """Flush `partial` to the disk and give it its name; the name itself is flushed with the directory."""
    flush(partial)
    os.replace(partial, path)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prune(directory: Path, kept: int | None = KEPT) -> None:
    """Remove all but the last `kept` checkpoints (None: none of them), and files that none of these names.

    A manifest that cannot be read, which may be that of a newer tritonrec, keeps every file in place but
    the half-written ones.
    """
    saved = steps(directory)
    dropped = saved[:-kept] if kept else []
    for step in dropped:
        manifest_of(directory, step).unlink()
    if dropped:
        flush(directory)  # or a power cut could bring back a manifest without its files
    named: set[str] = set()
    unreadable = False
    for step in steps(directory):
        try:
            named |= {entry["file"] for entry in files_of(read_manifest(manifest_of(directory, step)))}
        except CheckpointError:
            unreadable = True
    for name in os.listdir(directory):
        if name.startswith(PARTIAL):
            (directory / name).unlink()
        if not _FOLDER.fullmatch(name):
            continue
        for file in (f"{name}/{child}" for child in os.listdir(directory / name)):
            stale = _CONTENT.fullmatch(file) and file not in named and not unreadable
            if stale or file.startswith(f"{name}/{PARTIAL}"):
                (directory / file).unlink()
        if not os.listdir(directory / name):
            (directory / name).rmdir()


def _sha256_of_body(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
