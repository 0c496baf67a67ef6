"""The manifest of an export: read, and checked before anything is made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.files import sha256_of
from ..checkpoint.manifest import add_checksum
from .shards import SUFFIXES

FORMAT, VERSION = "tritonrec-export", 1
MANIFEST = "manifest.json"

_FILE = {"file": str, "sha256": str}
_TABLE = {"rows": int, "dim": int, "seed": int, "table_id": int, "scale": float, "format": str, "files": list}
_FEATURE = {"table": str, "pooling": str}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder; ValueError where it is none, was altered or does not describe an export."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        body = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
        named, version = manifest["format"], manifest["version"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder} is no export: {path} cannot be read ({error})") from error
    if named != FORMAT or version != VERSION:
        raise ValueError(f"{path} is {named} version {version}, and this tritonrec reads {FORMAT} {VERSION}")
    if add_checksum(body) != manifest:
        raise ValueError(f"{path} was altered: its own checksum does not fit")
    if wrong := next(_wrong(body), None):
        raise ValueError(f"{path} does not describe an export: {wrong}")
    return manifest


def checked_file(folder: Path, entry: Mapping[str, Any]) -> Path:
    """The path of a file of the manifest, if its checksum fits."""
    path = folder / entry["file"]
    try:
        digest = sha256_of(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read, but the manifest names it: {error.strerror}") from error
    except UnicodeError as error:
        raise ValueError(f"{folder}: the manifest names {entry['file']!a}, which no file can be") from error
    if digest != entry["sha256"]:
        raise ValueError(f"{path} was altered: its sha256 is {digest}, written {entry['sha256']}")
    return path


def _wrong(body: Mapping[str, Any]) -> Iterator[str]:
    """What is missing, or another thing than `export` writes."""
    parts = {"step": int, "tables": dict, "features": dict}
    yield from _other_types("the manifest", body, parts)
    for name, table in body["tables"].items():
        place = f"tables.{name}"
        yield from _other_types(place, table, _TABLE)
        if table["format"] not in SUFFIXES:
            yield f"{place}.format is {table['format']!r}"
        if not (0 <= table["rows"] < 2**63 and 1 <= table["dim"] < 2**31):
            yield f"{place} has {table['rows']} rows of {table['dim']} columns"
        for entry in table["files"]:
            yield from _other_types(f"{place}.files", entry, _FILE | {"rows": int})
            if entry["rows"] < 0:
                yield f"{place}.files has {entry['rows']} rows in {entry['file']}"
            yield from _other_folder(place, entry)
        if sum(entry["rows"] for entry in table["files"]) != table["rows"]:
            yield f"{place}.files have another number of rows than its {table['rows']}"
    for name, feature in body["features"].items():
        yield from _other_types(f"features.{name}", feature, _FEATURE)
        if feature["table"] not in body["tables"]:
            yield f"features.{name}.table is {feature['table']!r}, which is no table"
    vocabularies = body.get("vocabularies", {})
    yield from _other_types("the manifest", {"vocabularies": vocabularies}, {"vocabularies": dict})
    for name, entry in vocabularies.items():
        yield from _other_types(f"vocabularies.{name}", entry, _FILE | {"words": int})
        yield from _other_folder(f"vocabularies.{name}", entry)
    dense = body.get("dense", 0)
    if dense is not None:
        yield from _other_types("dense", dense, {"kind": str, "program": dict})
        for name in ("program", "compiled"):
            if name in dense:
                yield from _other_types(f"dense.{name}", dense[name], _FILE)
                yield from _other_folder(f"dense.{name}", dense[name])


def _other_types(place: str, values: Any, types: Mapping[str, type]) -> Iterator[str]:
    if not isinstance(values, dict):
        yield f"{place} is {str(values)[:40]!r}"
        return
    for name, kind in types.items():
        value = values.get(name)
        if type(value) is not kind and not (kind is float and type(value) is int):
            yield f"{name} of {place} is {str(value)[:40]!r}"


def _other_folder(place: str, entry: Mapping[str, str]) -> Iterator[str]:
    if Path(entry["file"]).name != entry["file"]:
        yield f"{place} names {entry['file']!r}, which is not in the folder"
