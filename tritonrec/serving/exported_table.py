"""A table of an export in memory: rows in float32, or in 8 bits.

A row in 8 bits is d codes from 0 to 255 with the row's least weight and the step between neighbouring codes,
as of FBGEMM's row-wise quantization: weight = least + code * step. A code is at most half a step off.

Dimensions: n rows, d columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..files.places import Place
from ..kernels.workers import over_ranges
from .manifest import checked_file, local_copy
from .shards import Weights, read_shard

UnknownIds = Literal["initial", "zeros"]
LOOKUP = 100  # floating-point operations that take as long as a row
Kind = tuple[tuple[int, ...], torch.dtype]


class Share(NamedTuple):
    """What one of several processes keeps of every table: the ids whose remainder by `ranks` is `rank`.

    rank None: all ids, and no weights.
    """

    rank: int | None
    ranks: int

    def of(self, ids: Tensor) -> Tensor:
        """Which of ids (n,) int64 are kept, (n,) bool."""
        return (
            torch.ones(len(ids), dtype=torch.bool, device="cpu")
            if self.rank is None
            else ids % self.ranks == self.rank
        )

    def columns(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows that are kept of ``ids``, ``weights`` and others."""
        if self.rank is None:
            return {"ids": columns["ids"], "weights": columns["weights"][:, :0].to(torch.float32)}
        own = self.of(columns["ids"])
        return {name: each[own] for name, each in columns.items()}


@dataclass(frozen=True)
class ExportedTable:
    """Weights by id.

    ids (n,) int64, ascending; weights (n, d) float32, or uint8 with ``least`` and ``step`` (n,) float32.
    An unknown id reads as its ``initial`` row, a function of (seed, table_id, id, column) as in training, or
    as ``zeros``.
    """

    ids: Tensor
    weights: Tensor
    seed: int
    table_id: int
    scale: float
    unknown: UnknownIds
    least: Tensor | None = None
    step: Tensor | None = None

    def rows(self, ids: Tensor) -> Tensor:
        """(n, d) float32 of ids (n,) int64, repeats allowed."""
        return rows_side_by_side([self], [ids]).squeeze(1)

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Places (n,) int64 of ids (n,), and which of them are there, (n,) bool."""
        places = torch.searchsorted(self.ids, ids.contiguous())
        if not len(self.ids):
            return places, torch.zeros(len(ids), dtype=torch.bool, device="cpu")
        places = places.clamp_(max=len(self.ids) - 1)
        return places, self.ids[places] == ids

    def filled(self, ids: Tensor, known: Tensor, found: Tensor) -> Tensor:
        """Rows (n, d) of ids (n,): `found` (m, d) of those that are `known` (n,), what the others read as."""
        rows = found.new_zeros(len(ids), found.shape[1])
        rows[known] = found
        if self.unknown == "initial" and not bool(known.all()):
            rows[~known] = ops.initial_rows(self.seed, self.table_id, ids[~known], found.shape[1], self.scale)
        return rows

    @cached_property
    def whole(self) -> Tensor:
        """All weights (n, d) float32; of codes they are made at the first use, and kept."""
        return self.weights if self.step is None else self._at(torch.arange(len(self.ids), device="cpu"))

    @property
    def _is_plain(self) -> bool:
        """Whether its ids and rows lie in memory as `numba_tables` reads them."""
        return (
            self.weights.dtype == torch.float32 and self.weights.is_contiguous() and self.ids.is_contiguous()
        )

    def _at(self, places: Tensor) -> Tensor:
        if self.least is None or self.step is None:
            return self.weights.index_select(0, places)
        return decoded(self.weights[places], self.least[places], self.step[places])


def rows_side_by_side(tables: Sequence[ExportedTable], ids: Sequence[Tensor]) -> Tensor:
    """(n, T, d) float32 of ids (n,) int64 of each of T tables, whose rows have d columns."""
    from .numba_tables import look_up

    count, dim = ids[0].shape[0], tables[0].weights.shape[1]
    out = torch.empty(count, len(tables), dim, dtype=torch.float32, device="cpu")
    ids = [each.contiguous() for each in ids]
    for table, each in zip(tables, ids, strict=True):  # a kernel goes by addresses
        fits = each.shape == (count,) and each.dtype == torch.int64 and each.is_cpu
        if not fits or table.weights.shape[1] != dim:
            raise ValueError(f"ids must be ({count},) int64 on the CPU, of tables with {dim} columns")
    given = np.array(
        [
            # a table of another form is looked up by itself below, as one that lacks an id
            (
                table.ids.data_ptr(),
                table.weights.data_ptr(),
                table.ids.shape[0] * table._is_plain,
                each.data_ptr(),
            )
            for table, each in zip(tables, ids, strict=True)
        ],
        np.int64,
    )
    unknown, flat = np.zeros(len(tables), np.bool_), out.numpy().reshape(-1)

    def run(start: int, stop: int) -> None:
        look_up(given, count, np.uintp(dim), flat, unknown, start, stop)

    over_ranges(run, count, float(LOOKUP * count * len(tables)))
    for number in unknown.nonzero()[0].tolist():
        table, own = tables[number], ids[number]
        places, known = table.find(own)
        out[:, number] = table.filled(own, known, table._at(places[known]))
    return out


def decoded(codes: Tensor, least: Tensor, step: Tensor) -> Tensor:
    """Weights (n, d) float32 of codes (n, d) uint8 and their rows' least weight and step (n,) float32."""
    return least[:, None] + codes.to(torch.float32) * step[:, None]


def encoded(weights: Tensor) -> dict[str, Tensor]:
    """Columns of weights (n, d) float32 in 8 bits; of a constant row every code is 0, and exact.

    Raises ValueError for a weight that is not finite, and for a row whose weights span more than float32.
    """
    least, most = weights.aminmax(dim=1)
    step = (most - least) / 255
    if bool((wrong := ~(step.isfinite() & least.isfinite())).any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"row {row} has weights from {float(least[row])} to {float(most[row])}: no 8 bits hold them"
        )
    # a step that underflows to 0 leaves the least weight, which is as near then as float32 tells
    codes = (weights - least[:, None]) / torch.where(step > 0, step, 1.0)[:, None]
    return {"weights": codes.round_().clamp_(0, 255).to(torch.uint8), "least": least, "step": step}


def columns_of(weights: Weights, dim: int) -> dict[str, Kind]:
    """Shape behind the rows, and dtype, of each column that a file of a table has."""
    ids: dict[str, Kind] = {"ids": ((), torch.int64)}
    if weights == "float32":
        return ids | {"weights": ((dim,), torch.float32)}
    of_row = (), torch.float32
    return ids | {"weights": ((dim,), torch.uint8), "least": of_row, "step": of_row}


def load_table(
    folder: Place, table: Mapping[str, Any], unknown: UnknownIds, share: Share | None = None
) -> ExportedTable:
    """A table of a manifest, or a share of it.

    Raises ValueError for files that are missing, altered or do not fit together.
    """
    kinds = columns_of(table.get("weights", "float32"), table["dim"])
    try:
        whole = {
            name: torch.empty(0 if share else table["rows"], *shape, dtype=dtype, device="cpu")
            for name, (shape, dtype) in kinds.items()
        }
    except (RuntimeError, MemoryError) as error:
        raise ValueError(
            f"{folder}: {table['rows']} rows of {table['dim']} columns take more memory than there is"
        ) from error
    at, parts = 0, [whole if share is None else share.columns(whole)]
    for entry in table["files"]:
        rows = entry["rows"]
        with local_copy(folder, entry) as local:
            file = checked_file(local, entry)
            columns = read_shard(file, table["format"])
        expected = {name: ((rows, *shape), dtype) for name, (shape, dtype) in kinds.items()}
        found = {name: (tuple(each.shape), each.dtype) for name, each in columns.items()}
        if not expected.items() <= found.items():
            raise ValueError(f"{file} has columns {found}, the manifest describes {expected}")
        if share is not None:
            parts.append(share.columns({name: columns[name] for name in kinds}))
            continue
        for name, values in whole.items():
            values[at : at + rows] = columns[name]
        at += rows
    if share is not None:
        whole = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
    ids, order = whole.pop("ids").sort()
    if bool((repeated := ids[1:] == ids[:-1]).any()):
        raise ValueError(f"{folder}: id {int(ids[1:][repeated][0])} is in the files of one table twice")
    ordered = {name: values[order] for name, values in whole.items()}
    known = table["seed"], table["table_id"], table["scale"], unknown
    return ExportedTable(ids, ordered["weights"], *known, ordered.get("least"), ordered.get("step"))
