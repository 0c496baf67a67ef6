"""Damaged files of every format: each is refused by name, equal, or legibly another file.

Exports, Parquet logs, shards of sequences, text and traces (`formats.py`) are damaged: bits, ranges and ends
of files, files swapped, copied, removed or replaced by what is no file, fields of text, values of the
manifest. In half of the cases of a format with checksums they are made to fit again. Then the files are read:

    refused     an error that names a file or the folder
    equal       the content of the original, bit for bit
    other       another content: only where no checksum could tell, such as a digit of a CSV file

Anything else is a defect: another content under a checksum, an error of a library that names no file, a
crash, a wait, more memory than a limit.

    python ci/attack/files.py [--format NAME] [--count 1000] [--seed 0] [--only NUMBER]

A case is a function of format, seed and number. After a defect the exit status is 1. What checkpoints have of
their own is in `corruptions.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import case_runner
import corruptions
import torch
from damage import BYTES, exchange_files, files_of, places_of, strange_values
from formats import FORMATS, Format

from tritonrec.checkpoint.manifest import add_checksum
from tritonrec.serving.exporter import MANIFEST

WORDS = [
    "",
    "nan",
    "inf",
    "-1",
    "1e400",
    "9" * 30,
    "0x10",
    "\0",
    "\ufeff",
    '"',
    "1.5",
    "-9223372036854775809",
]
"""In the place of a field of text."""
CHECKPOINT = "checkpoint"


def damage_bytes(folder: Path, draw: random.Random, others: list[Path]) -> str | None:
    path, change = draw.choice(files_of(folder)), draw.choice(BYTES)
    data = bytearray(path.read_bytes())
    if not data:
        return None
    change(data, draw)
    path.write_bytes(data)
    return f"{change.__name__.strip('_')} in {path.name}"


def damage_length(folder: Path, draw: random.Random, others: list[Path]) -> str:
    path = draw.choice(files_of(folder))
    size = draw.choice([0, 1, path.stat().st_size // 2, path.stat().st_size + 4096])
    os.truncate(path, size)
    return f"{path.name} has {size} bytes"


def damage_files(folder: Path, draw: random.Random, others: list[Path]) -> str | None:
    return exchange_files(folder, draw, others, [])


def damage_fields(folder: Path, draw: random.Random, others: list[Path]) -> str:
    """A field of text becomes another word."""
    path = draw.choice(files_of(folder))
    lines = path.read_text().split("\n")
    at = draw.randrange(len(lines))
    mark = "\t" if "\t" in lines[at] else ","
    fields = lines[at].split(mark)
    place, word = draw.randrange(len(fields)), draw.choice(WORDS)
    fields[place] = word
    lines[at] = mark.join(fields)
    path.write_text("\n".join(lines))
    return f"line {at + 1} of {path.name}: field {place + 1} is {word!r}"


def damage_manifest(folder: Path, draw: random.Random, others: list[Path]) -> str:
    """A value of an export's manifest."""
    path = folder / MANIFEST
    body = json.loads(path.read_text())
    holder, key, place = draw.choice(list(places_of(body)))
    value = draw.choice([*strange_values(holder[key]), "gone"])
    if value == "gone":
        del holder[key]
    else:
        holder[key] = value
    path.write_text(json.dumps(body))
    return f"{'.'.join(map(str, place))} = {str(value)[:40]!r} in the manifest"


def seal(folder: Path) -> bool:
    """Make the checksums of an export fit; whether its manifest allows it."""
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_text())
        for table in body["tables"].values():
            for entry in table["files"]:
                if (file := folder / entry["file"]).is_file():
                    entry["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        body.pop("manifest_sha256", None)
        path.write_text(json.dumps(add_checksum(body)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return True


def run_case(format: Format, number: int, seed: int, made: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Damage a copy of the original and read it; the case in words, and how it ended."""
    draw = random.Random(f"{format.name} {seed} {number}")
    copy, original = folder / "copy", made[format.name]
    damages: list[Callable[..., str | None]] = [damage_bytes, damage_bytes, damage_length, damage_files]
    damages += [damage_fields] * format.text + [damage_manifest] * format.sealed
    fits = format.sealed and draw.random() < 0.5
    words = None
    while words is None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(original, copy)
        change = draw.choice(damages)
        words = change(copy, draw, list(made.values()))
    fits = fits and seal(copy)
    end = _end(format, copy, original, changes_allowed=fits or not format.sealed)
    kind = change.__name__.removeprefix("damage_")
    return {
        "number": number, "seed": seed, "format": format.name, "kind": kind, "fits": fits, "damage": words,
        "end": end, "defect": end.partition(":")[0] not in ("refused", "equal", "other"),
    }  # fmt: skip


def _end(format: Format, folder: Path, original: Path, changes_allowed: bool) -> str:
    try:
        found = format.read(folder)
    except (ValueError, OSError) as error:
        named = str(folder) in str(error) and not isinstance(error, UnicodeError)
        text = f"{type(error).__name__}: {error}".replace(str(folder), "")
        return f"refused: {text[:300]}" if named else f"no file named: {text[:300]} {_where(error)}"
    except Exception as error:
        return f"library: {type(error).__name__}: {str(error)[:300]} {_where(error)}"
    if found == format.read(original):
        return "equal"
    return "other" if changes_allowed else "accepted: another content"


def _where(error: Exception) -> str:
    """The last lines of the project and of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "/tritonrec/" in each.filename]
    return "at " + ", ".join(f"{Path(each.filename).name}:{each.lineno}" for each in [*ours[-2:], frames[-1]])


def prepared(name: str, seed: int, folder: Path) -> Callable[[int], dict[str, Any]]:
    """Writes the originals of a format; gives what runs the case of a number."""
    if name == CHECKPOINT:
        checkpoints = corruptions.originals(folder)
        return lambda number: corruptions.run_case(number, seed, checkpoints, folder)
    format, made = FORMATS[name], {}
    for each in FORMATS.values():
        if each in (format, FORMATS["csv"], FORMATS["export-parquet"]):  # the others: foreign files
            made[each.name] = Path(folder, each.name)
            made[each.name].mkdir()
            each.write(made[each.name], random.Random(seed))
    assert _end(format, made[name], made[name], False) == "equal"
    return lambda number: run_case(format, number, seed, made, folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", action="append", choices=[*FORMATS, CHECKPOINT], help="by default all")
    parser.add_argument("--count", type=int, default=1000, help="of cases of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this case alone")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.format or [*FORMATS, CHECKPOINT]
    if args.work:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="tritonrec-") as folder:
            case_runner.run_all(case_runner.range_of(args.work), prepared(names[0], args.seed, Path(folder)))
        return 0
    numbers = range(args.count) if args.only is None else range(args.only, args.only + 1)
    defects = 0
    for name in names:
        ends: Counter[str] = Counter()
        for case in case_runner.attack([__file__, "--format", name, "--seed", str(args.seed)], numbers):
            ends.update(end.partition(":")[0] for end in case.get("ends", {"": case.get("end")}).values())
            defects += case["defect"]
            if case["defect"] or args.only is not None:
                print(json.dumps(case, indent=2), flush=True)
        print(f"{name}: {len(numbers):,} damaged, {dict(ends)}", flush=True)
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
