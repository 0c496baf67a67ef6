"""Ali-CCP's format (Ma et al., arXiv 1804.07931): impressions with lists of features, clicks as labels.

A folder with ``sample_skeleton_*.csv`` and ``common_features_*.csv``; text without header, fields between
commas. A feature is a field, an id and a weight between control characters, here ``^B`` and ``^C``; ``^A`` is
between features::

    skeleton   sample  click  buy  common     count  features of the impression
               1       0      0    bacff91692 2      216^B9342382^C1.0^A301^B9351665^C1.0
    common     common      count  features of the user, the same for many impressions
               bacff91692  2      101^B31319^C1.0^A127_14^B3775663^C2.30259

A field becomes a categorical feature with one id for each sample, as in arXiv 2512.19342, section V-F: where
a sample has several, the one with the largest weight, the first of equals. A missing one is `MISSING`. There
are no dense features. Files are read in the order of their names; the last tenth is held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from tritonrec.data.click_columns import LABEL
from tritonrec.data.criteo import MISSING
from tritonrec.data.ctr import ClickLog, num_training_rows

USER = ("101", "109_14", "110_14", "127_14", "150_14", "121", "122", "124", "125", "126", "127", "128", "129")
ITEM = ("205", "206", "207", "210", "216", "508", "509", "702", "853", "301")
FIELDS = USER + ITEM
"""The 23 fields."""
FEATURES = tuple(f"f{field}" for field in FIELDS)
"""Their names in a log."""
KINDS = ("common_features", "sample_skeleton")
_PLACES = {field: place for place, field in enumerate(FIELDS)}


PART_ROWS = 1 << 14
"""Impressions that are in memory at once while they are written as Parquet."""


def read(path: Path | str) -> ClickLog:
    """Read the folder `path`, whole; the errors of `parts`, and ValueError where it has no impressions."""
    rows, labels = [], []
    for ids, label in _impressions(Path(path)):
        rows.append(ids)
        labels.append(label)
    if not rows:
        raise ValueError(f"{path}: holds no impressions")
    return ClickLog(
        np.zeros((len(rows), 0), np.float32), np.array(rows, np.int64), np.array(labels, np.int64), FEATURES,
        num_training_rows(len(rows)),
    )  # fmt: skip


def parts(path: Path | str) -> Iterator[pa.Table]:
    """The impressions in plain columns (`tritonrec.data.click_columns`), in parts and in their order.

    The common features are in memory, one list of `FIELDS` for each line of their files.

    Raises FileNotFoundError where the folder has no files of one of the two kinds, and ValueError naming file
    and line of a bad field, or of an impression whose common features are nowhere.
    """
    every = _impressions(Path(path))
    while some := list(islice(every, PART_ROWS)):
        ids = np.array([row for row, _label in some], np.int64)
        columns = {LABEL: np.array([label for _row, label in some], np.int8)}
        yield pa.table(columns | dict(zip(FEATURES, ids.T, strict=True)))


def files(path: Path | str) -> list[Path]:
    """Of both kinds, in the order in which they are read; raises FileNotFoundError as `parts`."""
    return [file for kind in KINDS for file in _files(Path(path), kind)]


def _impressions(folder: Path) -> Iterator[tuple[list[int], int]]:
    """The ids and the label of each impression."""
    common: dict[str, list[int]] = {}
    of_user, of_impression = KINDS
    for file, line, fields in _lines(folder, of_user, 3):
        common[fields[0]] = _ids(file, line, fields[2], [MISSING] * len(FIELDS))
    for file, line, fields in _lines(folder, of_impression, 6):
        if fields[1] not in ("0", "1"):
            raise ValueError(f"{file}, line {line}: click is {fields[1]!r}, expected 0 or 1")
        if fields[3] not in common:
            raise ValueError(f"{file}, line {line}: there are no common features {fields[3]!r}")
        yield _ids(file, line, fields[5], common[fields[3]]), int(fields[1])


def _files(folder: Path, kind: str) -> list[Path]:
    found = sorted(folder.expanduser().glob(f"{kind}*.csv"))
    if not found:
        raise FileNotFoundError(f"{folder}: no file {kind}*.csv")
    return found


def _lines(folder: Path, kind: str, count: int) -> Iterator[tuple[Path, int, list[str]]]:
    """File, number and fields of each line of the files of a kind, of `count` fields."""
    for file in _files(folder, kind):
        try:
            with file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    fields = line.rstrip("\n").split(",")
                    if len(fields) != count:
                        raise ValueError(f"{file}, line {number}: {len(fields)} fields, expected {count}")
                    yield file, number, fields
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 text: {error}") from error


def _ids(file: Path, line: int, features: str, base: list[int]) -> list[int]:
    """The id of each field: `base`, with those of `features` that are in `FIELDS` in their places."""
    ids, best = base.copy(), dict.fromkeys(range(len(FIELDS)), -np.inf)
    for feature in filter(None, features.split("\x01")):
        try:
            field, rest = feature.split("\x02")
            id, weight = rest.split("\x03")
            number, weighed = int(np.int64(int(id))), float(weight)
        except (ValueError, OverflowError):
            raise ValueError(f"{file}, line {line}: {feature!r} is no field, id and weight") from None
        place = _PLACES.get(field)
        if place is not None and weighed > best[place]:
            ids[place], best[place] = number, weighed
    return ids
