"""The manifest of an export: read, and checked before anything is made of it."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoint.files import sha256_of, size_of
from ..checkpoint.manifest import add_checksum
from ..files.places import Place, read_document
from .programs import CLICK, IMPRESSION, NEXT_ITEM, SCORER
from .shards import SUFFIXES, WEIGHTS

FORMAT, VERSION = "tritonrec-export", 1
MANIFEST = "manifest.json"

_FILE = {"file": str, "sha256": str}
_TABLE = {"rows": int, "dim": int, "seed": int, "table_id": int, "scale": float, "format": str, "files": list}
_FEATURE = {"table": str, "pooling": str}
_FACTS: dict[str, dict[str, type]] = {
    NEXT_ITEM: {"max_seq_len": int, "timestamps": bool},
    CLICK: {"features": list, "dense": int},
    IMPRESSION: {"context": list, "tasks": list, "genres": bool, "max_seq_len": int},
    SCORER: {},
}
"""What a predictor reads of the dense part, by its kind."""
_POOLINGS = ("none", "sum", "mean")


def read_manifest(folder: Place) -> dict[str, Any]:
    """The manifest of a folder; ValueError where it is none, was altered or does not describe an export."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_document(path, "manifest"))
        body = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
        named, version, fits = manifest["format"], manifest["version"], add_checksum(body) == manifest
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder} is no export: {path} cannot be read ({error})") from error
    if named != FORMAT or version != VERSION:
        raise ValueError(f"{path} is {named} version {version}, and this tritonrec reads {FORMAT} {VERSION}")
    if not fits:
        raise ValueError(f"{path} was altered: its own checksum does not fit")
    if wrong := next(_wrong(body), None):
        raise ValueError(f"{path} does not describe an export: {wrong}")
    return manifest


@contextmanager
def local_copy(folder: Place, entry: Mapping[str, Any]) -> Iterator[Path]:
    """A local folder with a file of the manifest: `folder` itself, or for a URL a copy, which is removed."""
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tritonrec-") as name:
        source, copied = folder / entry["file"], Path(name, entry["file"])
        try:
            source.download(copied)
        except OSError as error:
            raise ValueError(
                f"{source} cannot be read, but the manifest names it: {error.strerror}"
            ) from error
        _check_digest(source, sha256_of(copied), entry)
        yield Path(name)


def checked_file(folder: Path, entry: Mapping[str, Any]) -> Path:
    """The path of a file of the manifest, if its checksum fits."""
    path = folder / entry["file"]
    try:
        real = os.path.realpath(path)
        if os.path.dirname(real) != os.path.realpath(folder):
            raise ValueError(f"{path} is a link to {real}, out of the folder: copy the file there")
        size_of(path)  # of a regular file, whose read ends
        digest = sha256_of(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read, but the manifest names it: {error.strerror}") from error
    except UnicodeError as error:
        raise ValueError(f"{folder}: the manifest names {entry['file']!a}, which no file can be") from error
    _check_digest(path, digest, entry)
    return path


def _check_digest(path: Place, digest: str, entry: Mapping[str, Any]) -> None:
    if digest != entry["sha256"]:
        raise ValueError(f"{path} was altered: its sha256 is {digest}, written {entry['sha256']}")


def _wrong(body: Mapping[str, Any]) -> Iterator[str]:
    """What is missing, or another thing than `export` writes; nothing is looked at behind the first."""
    yield from _other_types("the manifest", body, {"step": int, "tables": dict, "features": dict})
    entries: list[Any] = []
    for name, table in body["tables"].items():
        yield from _wrong_table(f"tables.{name}", table)
        entries += table["files"]
    for name, feature in body["features"].items():
        yield from _other_types(f"features.{name}", feature, _FEATURE)
        if feature["table"] not in body["tables"]:
            yield f"features.{name}.table is {feature['table']!r}, which is no table"
        if feature["pooling"] not in _POOLINGS:
            yield f"features.{name}.pooling is {feature['pooling']!r}"
    vocabularies = body.get("vocabularies", {})
    yield from _other_types("the manifest", {"vocabularies": vocabularies}, {"vocabularies": dict})
    for name, entry in vocabularies.items():
        yield from _wrong_file(f"vocabularies.{name}", entry)
        yield from _other_types(f"vocabularies.{name}", entry, {"words": int})
        entries.append(entry)
    dense = body.get("dense", 0)
    if dense is not None:
        yield from _other_types("dense", dense, {"kind": str, "program": dict})
        for name in ("program", "compiled"):
            if name in dense:
                yield from _wrong_file(f"dense.{name}", dense[name])
                entries.append(dense[name])
        if dense["kind"] not in _FACTS:
            yield f"dense.kind is {dense['kind']!r}"
        yield from _other_types("dense", dense, _FACTS[dense["kind"]])
        if "layers" in dense:
            yield from _other_types("dense.layers", dense["layers"], {"model": str, "config": dict})
            yield from _other_types("dense", dense, {"precision": str})
        for name in ("features", "context", "tasks"):
            if not all(isinstance(each, str) for each in dense.get(name, ())):
                yield f"dense.{name} has other values than names"
        if dense.get("max_seq_len", 1) < 1:
            yield f"dense.max_seq_len is {dense['max_seq_len']}"
        wanted = {NEXT_ITEM: ["item"], IMPRESSION: ["item", "action"]}.get(dense["kind"], [])
        wanted = [*wanted, *dense.get("features", ()), *dense.get("context", ())]
        for name in wanted if dense["kind"] != SCORER else ():
            if name not in body["features"]:
                yield f"its dense model reads a feature {name!r}, and it has {', '.join(body['features'])}"
    named = Counter(entry["file"] for entry in entries)
    for file, times in named.most_common(1):
        if times > 1:
            yield f"it names {file!r} {times} times"


def _wrong_table(place: str, table: Any) -> Iterator[str]:
    yield from _other_types(place, table, _TABLE)
    if table["format"] not in SUFFIXES:
        yield f"{place}.format is {table['format']!r}"
    if table.get("weights", "float32") not in WEIGHTS:
        yield f"{place}.weights is {str(table['weights'])[:40]!r}"
    if not (0 <= table["rows"] < 2**63 and 1 <= table["dim"] < 2**31):
        yield f"{place} has {table['rows']} rows of {table['dim']} columns"
    if not (-(2**63) <= table["seed"] < 2**63 and 0 <= table["table_id"] < 2**32):
        yield f"{place} has the seed {table['seed']} and the number {table['table_id']}"
    if not math.isfinite(table["scale"]):
        yield f"{place}.scale is {table['scale']}"
    for entry in table["files"]:
        yield from _wrong_file(place, entry, f"{place}.files")
        yield from _other_types(f"{place}.files", entry, {"rows": int})
        if entry["rows"] < 0:
            yield f"{place}.files has {entry['rows']} rows in {entry['file']}"
    if sum(entry["rows"] for entry in table["files"]) != table["rows"]:
        yield f"{place}.files have another number of rows than its {table['rows']}"


def _wrong_file(place: str, entry: Any, values: str = "") -> Iterator[str]:
    yield from _other_types(values or place, entry, _FILE)
    if "bytes" in entry and (type(entry["bytes"]) is not int or entry["bytes"] < 0):
        yield f"bytes of {place} is {str(entry['bytes'])[:40]!r}"
    file = entry["file"]
    if Path(file).name != file or file in ("", ".", "..") or "\0" in file:
        yield f"{place} names {file[:80]!r}, which is not in the folder"


def _other_types(place: str, values: Any, types: Mapping[str, type]) -> Iterator[str]:
    if not isinstance(values, dict):
        yield f"{place} is {str(values)[:40]!r}"
        return
    for name, kind in types.items():
        value = values.get(name)
        if type(value) is not kind and not (kind is float and type(value) is int):
            yield f"{name} of {place} is {str(value)[:40]!r}"
