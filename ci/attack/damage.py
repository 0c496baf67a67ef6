"""Damage to a directory of checkpoints, for `corruptions.py`: bytes, lengths, headers, files, values.

Each function changes the directory and says in words what it did, or gives None where there was nothing to
change. Where checksums are to fit, those of files and manifests are made again after the change.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tritonrec.checkpoint import steps
from tritonrec.checkpoint.files import manifest_of
from tritonrec.checkpoint.manifest import add_checksum

Damage = Callable[[Path, random.Random, bool, list[Path]], str | None]
"""(directory, draw, whether checksums are to fit, other directories) -> what was done, or None."""


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _tensors(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*/*.safetensors"))


def _range(draw: random.Random, length: int) -> tuple[int, int]:
    first = draw.randrange(length)
    return first, min(length, first + draw.choice([1, 2, 8, 64, 1024]))


def _flip(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice([1, 1, 2, 8])):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _cut(data: bytearray, draw: random.Random) -> None:
    first, last = _range(draw, len(data))
    del data[first : draw.choice([last, len(data)])]


def _zero(data: bytearray, draw: random.Random) -> None:
    first, last = _range(draw, len(data))
    data[first:last] = bytes(last - first)


def _double(data: bytearray, draw: random.Random) -> None:
    first, last = _range(draw, len(data))
    data[last:last] = data[first:last]


def _exchange(data: bytearray, draw: random.Random) -> None:
    first, last = _range(draw, len(data))
    other = draw.randrange(len(data))
    moved, place = data[first:last], slice(other, other + last - first)
    data[first:last], data[place] = data[place], moved


def _grow(data: bytearray, draw: random.Random) -> None:
    data += draw.choice([b"\0", b" ", b"\n", draw.randbytes(9), bytes(4096)])


BYTES = (_flip, _cut, _zero, _double, _exchange, _grow)


def damage_bytes(directory: Path, draw: random.Random, fits: bool, others: list[Path]) -> str | None:
    """Bytes of any file; where checksums are to fit, those of a header or of a manifest's text."""
    path = draw.choice(files_of(directory))
    data, change = bytearray(path.read_bytes()), draw.choice(BYTES)
    name = change.__name__.strip("_")
    if not fits:
        change(data, draw)
        path.write_bytes(data)
        return f"{name} in {path.relative_to(directory)}"
    if path.suffix == ".json":
        before = json.loads(data)
        change(data, draw)
        try:
            body = json.loads(data)
            if body["meta"] != before["meta"]:
                return None  # a value that only the checksum protects
        except (ValueError, KeyError, TypeError, RecursionError):
            path.write_bytes(data)  # nothing a checksum could be made for
            return f"{name} in {path.name}, no JSON"
        _write_sealed(path, body)
        return f"{name} in {path.name}, sealed"
    header = 8 + int.from_bytes(data[:8], "little")
    head = data[:header]
    change(head, draw)
    _replace(directory, path, bytes(head + data[header:]))
    return f"{name} in the header of {path.name}, sealed"


def damage_length(directory: Path, draw: random.Random, fits: bool, others: list[Path]) -> str | None:
    """A file that a disk holds for nothing, longer than any memory; or the length that its entry says."""
    path = draw.choice(files_of(directory))
    size = draw.choice([0, 1, 1 << 33, 1 << 40])
    os.truncate(path, size)
    if fits and path.suffix != ".json":
        for _, body, entry in _entries(directory, path):
            entry["bytes"] = size
            _write_sealed(manifest_of(directory, body["step"]), body)
    return f"{path.relative_to(directory)} has {size} bytes"


def damage_header(directory: Path, draw: random.Random, fits: bool, others: list[Path]) -> str | None:
    """One value of a tensor file's header."""
    path = draw.choice(_tensors(directory))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, payload = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    name = draw.choice(names)
    kind = draw.choice(
        ["dtype", "shape", "data_offsets", "name", "gone", "part", "metadata", "length", "deep"]
    )
    if kind == "dtype":
        header[name]["dtype"] = draw.choice(
            ["F64", "F32", "I32", "BF16", "BOOL", "F8_E4M3", "C64", "X", 7, None]
        )
    elif kind in ("shape", "data_offsets"):
        header[name][kind] = draw.choice(
            [[], [-1], [2**63], [0, 0], [1.5], None, "3", header[name][kind] * 2]
        )
    elif kind == "name":
        header[name + draw.choice(["", " ", "x"])] = header.pop(name)
    elif kind == "gone":
        del header[name]
    elif kind == "part":
        header["__metadata__"]["part"] = draw.choice(
            ["", "{}", "[" * 5000, "null", "7", '{"table": "items"}']
        )
    elif kind == "metadata":
        header["__metadata__"] = draw.choice([{}, None, {"part": None}, [], "part"])
    text = json.dumps(header).encode() if kind != "deep" else b"[" * 50_000
    if kind == "length":
        length = draw.choice([0, 1, len(text) - 1, len(text) + 8, 1 << 32, (1 << 64) - 1])
        content = length.to_bytes(8, "little") + text + payload
    else:
        content = len(text).to_bytes(8, "little") + text + payload
    if content == data:
        return None
    if fits:
        _replace(directory, path, content)
    else:
        path.write_bytes(content)
    return f"{kind} of {name!r} in {path.relative_to(directory)}"


def damage_files(directory: Path, draw: random.Random, fits: bool, others: list[Path]) -> str | None:
    """Files swapped, renamed, copied, removed, from elsewhere, or no files at all."""
    if not draw.randrange(10):
        path = manifest_of(directory, draw.choice(steps(directory)))
        renamed = manifest_of(
            directory,
            draw.choice([step for step in (5, 20, 25, 30, 99) if manifest_of(directory, step) != path]),
        )
        draw.choice([shutil.copy, os.rename])(path, renamed)
        return f"rename: {path.relative_to(directory)}"
    return exchange_files(directory, draw, others, ["fifo", "link"])


def exchange_files(folder: Path, draw: random.Random, others: list[Path], more: list[str]) -> str | None:
    """Swap, copy or remove a file; or put one from elsewhere, an empty one or no file in its place."""
    path, other = draw.choice(files_of(folder)), draw.choice(files_of(folder))
    kind = draw.choice(["swap", "copy", "remove", "foreign", "folder", "loop", "nothing", *more])
    if path == other and kind in ("swap", "copy"):
        return None
    if kind == "swap":
        left, right = path.read_bytes(), other.read_bytes()
        path.write_bytes(right)
        other.write_bytes(left)
    elif kind == "copy":
        shutil.copy(path, other)
    elif kind == "foreign":
        shutil.copy(draw.choice(files_of(draw.choice(others))), path)
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "loop":
            path.symlink_to(path)
        elif kind == "link":
            path.symlink_to("/dev/zero")
        elif kind == "nothing":
            path.touch()
    return f"{kind}: {path.relative_to(folder)}"


def damage_parts(directory: Path, draw: random.Random, fits: bool, others: list[Path]) -> str | None:
    """The files of two parts, or of a part and the dense tensors, change places, with their entries."""
    manifest = manifest_of(directory, draw.choice(steps(directory)))
    body = json.loads(manifest.read_text())
    left, right = draw.sample(list(_entries_of(body)), 2)
    keys = draw.choice([["file"], ["sha256"], ["bytes"], ["file", "sha256", "bytes"], ["rows", "erased"]])
    for key in keys:
        if key in left and key in right:
            left[key], right[key] = right[key], left[key]
    _write_sealed(manifest, body) if fits else manifest.write_text(json.dumps(body))
    return f"{keys} of two parts in {manifest.name}"


def damage_values(directory: Path, draw: random.Random, fits: bool, others: list[Path]) -> str | None:
    """One value of a manifest, by its type."""
    manifest = manifest_of(directory, draw.choice(steps(directory)))
    body = json.loads(manifest.read_text())
    places = list(places_of(body))
    holder, key, path = draw.choice(places)
    if path[0] == "meta" and len(path) > 1 and fits:
        return None
    value = holder[key]
    chosen = draw.choice([*strange_values(value), "gone", "renamed"])
    if path == ("meta",) and fits and isinstance(chosen, dict):
        return None  # another `meta`, which only the checksum protects
    if chosen == "gone":
        del holder[key]
    elif chosen == "renamed" and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    else:
        holder[key] = chosen
    _write_sealed(manifest, body) if fits else manifest.write_text(json.dumps(body))
    return f"{'.'.join(map(str, path))} = {str(chosen)[:40]!r} in {manifest.name}"


DAMAGES: tuple[Damage, ...] = (
    damage_bytes, damage_length, damage_header, damage_files, damage_parts, damage_values, damage_values,
)  # fmt: skip


def strange_values(value: Any) -> list[Any]:
    """What may stand in the place of a value of JSON."""
    strange: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 1.0, float("nan"), float("inf")]
    strange += ["", "x", "\ud800", [], {}, [[]], {"": 0}, "0" * 64, "../../x", [None] * 3, "float32", "int64"]
    if isinstance(value, int):
        strange += [value + 1, value - 1, -value, float(value), str(value), 2 * value]
    elif isinstance(value, str):
        strange += [value[:-1], value + "0", value.upper(), value.replace("0", "1", 1), f"./{value}", [value]]
    elif isinstance(value, list):
        strange += [value[1:], value[:-1], value[::-1], value + value[:1], value * 2, dict(enumerate(value))]
    elif isinstance(value, dict):
        strange += [list(value), {**value, "more": 0}, dict(list(value.items())[1:]), [value]]
    return strange


def places_of(value: Any, path: tuple = ()) -> Iterator[tuple[Any, Any, tuple]]:
    """Every value inside, as its holder, its key there and its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if (*path, key) != ("manifest_sha256",):
            yield value, key, (*path, key)
            yield from places_of(inner, (*path, key))


def _entries_of(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield body["dense"]
    for table in body["tables"].values():
        for layer in table["layers"]:
            yield from layer["parts"]


def _entries(directory: Path, path: Path) -> list[tuple[Path, dict[str, Any], dict[str, Any]]]:
    """Manifests that name a file, read, and its entry in each."""
    name = f"{path.parent.name}/{path.name}"
    found = []
    for step in steps(directory):
        body = json.loads(manifest_of(directory, step).read_text())
        found += [
            (manifest_of(directory, step), body, each) for each in _entries_of(body) if each["file"] == name
        ]
    return found


def _replace(directory: Path, path: Path, content: bytes) -> None:
    """Another content for a tensor file, under the name and with the checksums that fit."""
    digest = hashlib.sha256(content).hexdigest()
    new = path.with_name(f"{path.name.rsplit('.', 2)[0]}.{digest[:16]}.safetensors")
    for manifest, body, entry in _entries(directory, path):
        entry |= {"file": f"{new.parent.name}/{new.name}", "bytes": len(content), "sha256": digest}
        _write_sealed(manifest, body)
    path.unlink()
    new.write_bytes(content)


def _write_sealed(manifest: Path, body: Any) -> None:
    if isinstance(body, dict):
        body = add_checksum({key: value for key, value in body.items() if key != "manifest_sha256"})
    manifest.write_text(json.dumps(body))
