"""Windows of impressions streamed from Parquet (`tritonrec.data.convert_windows`), a row each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tritonrec.data.epochs import check_at_least
from tritonrec.data.impressions import ImpressionBatch, ImpressionSamples
from tritonrec.data.interactions import ItemGenres
from tritonrec.data.jagged import KeyedJaggedTensor, Lookup, token_indices
from tritonrec.data.splits import Part, check_part
from tritonrec.data.stream import Stream
from tritonrec.files.places import Place, place_of, read_document
from tritonrec.settings import typed

if TYPE_CHECKING:
    import pyarrow as pa

    from tritonrec.data.parquet_rows import ParquetRows

ABOUT_FILE = "_windows.json"
PART_FILES: dict[Part, str] = {"test": "_held_out.parquet", "validation": "_validation.parquet"}
HISTORY, EXPOSED = ("item", "action", "timestamp"), ("shown", "shown_timestamp", "label")
"""Columns of lists, of one length in a row; of labels one for each task."""
HINT = "tritonrec.data.convert_windows.write_windows makes such a folder of a log"


@typed
class ImpressionStream(ImpressionSamples, Stream[ImpressionBatch]):
    """Windows streamed from the folder of `write_windows`, and the held-out ones of each user.

    Args:
        folder: of `write_windows`.
        batch_size, seed, rank, world_size, shuffle, buffer_rows, readers: see `Stream`.

    Raises the errors of `Stream`, and ValueError for a folder without windows or with other columns; while
    reading, ValueError naming the folder and the column of lists that do not fit each other.
    """

    def __init__(
        self,
        folder: str | Path,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        buffer_rows: int = 1 << 15,
        readers: int = 64,
    ) -> None:
        from tritonrec.data.log_files import files_at
        from tritonrec.data.parquet import features_beside  # pyarrow is slow to import

        self.folder = place_of(folder)
        self.context, self.tasks, self.label_rule = _about(self.folder / ABOUT_FILE)
        self._genres = features_beside(files_at(str(folder)))[1]
        self.has_genres = self._genres is not None
        super().__init__(
            self._rows(self.folder), None, batch_size, seed, rank, world_size, shuffle, buffer_rows,
            readers,
        )  # fmt: skip

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "tasks": list(self.tasks), "context": list(self.context)}

    def evaluation_batches(self, batch_size: int = 256, part: Part = "test") -> Iterator[ImpressionBatch]:
        check_at_least("batch_size", batch_size, 1)
        file = self.folder / PART_FILES[check_part(part)]
        if not file.exists():
            raise ValueError(
                f"{self.folder}: no window is held out for {part}: write the windows with a split"
            )
        for numbers, table in self._rows(file).batches(batch_size):
            yield self.collate(0, torch.from_numpy(numbers), table)

    def _rows(self, path: Place) -> ParquetRows:
        from tritonrec.data.parquet_rows import ParquetRows

        rows = ParquetRows(path)
        rows.check((*HISTORY, *EXPOSED), [f"context_{name}" for name in self.context], HINT)
        return rows

    def collate(self, step: int, sample_ids: Tensor, table: pa.Table) -> ImpressionBatch:
        from tritonrec.data.times import lists
        from tritonrec.data.values import Part, integers

        part = Part(str(self.folder), "row", sample_ids.numpy())
        past, shown = (lists(part, name, table.column(name))[1] for name in ("item", "shown"))

        def values(name: str, lengths: np.ndarray) -> Tensor:
            """The values of a column, which has lists of these `lengths` (b,)."""
            own, found = lists(part, name, table.column(name))
            if not np.array_equal(found, lengths):
                row = int((found != lengths).nonzero()[0][0])
                raise ValueError(
                    f"{self.folder}, row {part.number(row)}: a row has {found[row]} values in {name!r}, "
                    f"expected {lengths[row]}"
                )
            return torch.from_numpy(own)

        items, actions, times = (values(name, past) for name in HISTORY)
        exposed, shown_times = (values(name, shown) for name in EXPOSED[:-1])
        labels = values(EXPOSED[-1], shown * len(self.tasks))
        features = {
            "history": Lookup(items, torch.from_numpy(np.append(0, np.cumsum(past)))),
            "exposed": Lookup(exposed, torch.from_numpy(np.append(0, np.cumsum(shown)))),
        }
        for name in self.context:
            column = f"context_{name}"
            features[name] = Lookup(torch.from_numpy(integers(part, column, table.column(column)).copy()))
        return ImpressionBatch(
            step=step,
            sample_ids=sample_ids,
            features=KeyedJaggedTensor.from_dict(features),
            history_actions=actions,
            timestamps=torch.cat([times, shown_times]),
            labels=labels.view(-1, len(self.tasks)),
            genres=None if self._genres is None else _bags(self._genres, torch.cat([items, exposed])),
            tasks=self.tasks,
        )


def _about(file: Place) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Names of the context and of the tasks, and the rule of the labels, of the file of a folder."""
    try:
        about = json.loads(read_document(file, "description of windows"))
        found = [about[name] for name in ("context", "tasks")]
    except OSError as error:
        raise ValueError(f"{file.parent} has no windows of impressions: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    for names in found:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{file}: names of context and tasks must be lists of texts, got {names!r}")
    context, tasks = map(tuple, found)
    return context, tasks, str(about.get("label_rule", ""))


def _bags(genres: ItemGenres, items: Tensor) -> KeyedJaggedTensor:
    """The genres of items (n,) int64, a bag for each."""
    starts, lengths = map(torch.from_numpy, genres.of(items.numpy()))
    ids, offsets = token_indices(starts, lengths)
    return KeyedJaggedTensor(("genre",), torch.from_numpy(genres.genres)[ids], offsets)
