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

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritonrec.data.click_columns import MISSING, ClickColumns, Clicks
from tritonrec.data.log_files import LogFiles, files_at
from tritonrec.data.log_format import LogFormat
from tritonrec.data.text_tables import CsvFile
from tritonrec.data.values import Part, flags, integers, numbers

USER = ("101", "109_14", "110_14", "127_14", "150_14", "121", "122", "124", "125", "126", "127", "128", "129")
ITEM = ("205", "206", "207", "210", "216", "508", "509", "702", "853", "301")
FIELDS = USER + ITEM
"""The 23 fields."""
FEATURES = tuple(f"f{field}" for field in FIELDS)
"""Their names in a log."""
COMMON = ("common", "count", "features")
SKELETON = ("sample", "click", "buy", "common", "count", "features")
PATTERNS = ("common_features*.csv", "sample_skeleton*.csv")
_FEATURE = "^(?P<field>[^\x02\x03]*)\x02(?P<id>[^\x02\x03]*)\x03(?P<weight>[^\x02\x03]*)$"


class AliCcp(Clicks):
    """The log of the folder `path`; common features are in memory, a row of 23 ids for each of their lines.

    Raises FileNotFoundError where the folder has no files of one of the two kinds.
    """

    def __init__(self, path: Path | str) -> None:
        self.name, self.format, self.words = str(path), LogFormat(), {}
        self._kinds = [files_at(self.name, patterns=(pattern,)) for pattern in PATTERNS]
        of_users, own = self._kinds
        self.place = replace(of_users, path=self.name, files=[*of_users.files, *own.files], is_folder=False)

    def columns(self) -> ClickColumns:
        """A label, and a category for each field."""
        return ClickColumns("label", (), FEATURES)

    def parts(self, columns: ClickColumns) -> Iterator[tuple[Part, pa.Table]]:
        """The impressions in parts, in order.

        Raises ValueError naming file and line of a bad field, or of an impression whose common features are
        nowhere.
        """
        of_users, own = self._kinds
        users: dict[str, int] = {}
        common: list[np.ndarray] = []
        count = 0
        for part, table in _tables(of_users, COMMON):
            names = table.column("common").to_pylist()
            users |= {name: number for number, name in enumerate(names, count)}
            count += len(names)
            common.append(_ids(part, table, np.full((len(names), len(FIELDS)), MISSING)))
        every = np.concatenate(common) if common else np.empty((0, len(FIELDS)), np.int64)
        for part, table in _tables(own, SKELETON):
            label = flags(part, "click", table.column("click"))
            rows = np.array([users.get(name, -1) for name in table.column("common").to_pylist()], np.int64)
            if (rows < 0).any():
                part.fail("common", table.column("common"), rows < 0, "one of the common features")
            ids = _ids(part, table, every[rows])
            yield part, pa.table({"label": label} | dict(zip(FEATURES, ids.T, strict=True)))


def _tables(found: LogFiles, columns: Sequence[str]) -> Iterator[tuple[Part, pa.Table]]:
    format = LogFormat(columns=tuple(columns), header="no", delimiter="comma", quote="none")
    for file in found.files:
        if found.filesystem.get_file_info(file).size:
            yield from CsvFile(found.filesystem, file, format).tables(columns)


def _ids(part: Part, table: pa.Table, base: np.ndarray) -> np.ndarray:
    """The id of each field (n, 23): `base`, with those of the features in their places."""
    lists = pc.split_pattern(pc.fill_null(table.column("features").combine_chunks(), ""), "\x01")
    rows, words = pc.list_parent_indices(lists).to_numpy(), pc.list_flatten(lists)
    there = pc.not_equal(words, "")
    rows, words = rows[there.to_numpy(zero_copy_only=False)], words.filter(there)
    own = Part(part.path, part.unit, lambda at: part.number(int(rows[at])))
    found = pc.extract_regex(words, _FEATURE)
    if found.null_count:
        own.fail(
            "features", words, found.is_null().to_numpy(zero_copy_only=False), "a field, an id and a weight"
        )
    field, id, weight = (pc.struct_field(found, name) for name in ("field", "id", "weight"))
    ids, weights = integers(own, "features, an id,", id), numbers(own, "features, a weight,", weight)
    place = pc.fill_null(pc.index_in(field, pa.array(FIELDS)), -1).to_numpy()
    order = np.lexsort(
        (np.arange(len(ids)), -weights, place, rows)
    )  # the largest weight first, of equals the first
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(rows[order]) != 0) | (np.diff(place[order]) != 0)
    chosen = order[first & (place[order] >= 0)]
    base[rows[chosen], place[chosen]] = ids[chosen]
    return base
