"""Windows of impressions streamed from Parquet (`tritonrec.data.convert_windows`), a row each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tritonrec.data.epochs import check_at_least
from tritonrec.data.features import ItemGenres
from tritonrec.data.impressions import ImpressionBatch
from tritonrec.data.jagged import KeyedJaggedTensor, Lookup, token_indices
from tritonrec.data.stream import Stream

if TYPE_CHECKING:
    import pyarrow as pa

HELD_OUT_FILE, ABOUT_FILE = "_held_out.parquet", "_windows.json"


class ImpressionStream(Stream[ImpressionBatch]):
    """Windows streamed from the folder of `write_windows`, and the held-out one of each user.

    Args:
        folder: of `write_windows`.
        batch_size, seed, rank, world_size, shuffle, buffer_rows, readers: see `Stream`.

    Attributes:
        context, tasks: names.

    Raises the errors of `Stream`, and ValueError for a folder without windows.
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
        from tritonrec.data.parquet import features_beside
        from tritonrec.data.parquet_rows import ParquetRows  # pyarrow is slow to import

        self.folder = Path(folder)
        try:
            about = json.loads((self.folder / ABOUT_FILE).read_text())
        except OSError as error:
            raise ValueError(f"{folder} has no windows of impressions: {error}") from error
        self.context, self.tasks = tuple(about["context"]), tuple(about["tasks"])
        self._genres = features_beside(folder)[1]
        super().__init__(
            ParquetRows(folder), self._collate, batch_size, seed, rank, world_size, shuffle, buffer_rows,
            readers,
        )  # fmt: skip

    @property
    def has_genres(self) -> bool:
        """Whether items have genres."""
        return self._genres is not None

    def evaluation_batches(self, batch_size: int = 256) -> Iterator[ImpressionBatch]:
        """The held-out window of every user, at most `batch_size` at a time, as step 0."""
        from tritonrec.data.parquet_rows import ParquetRows

        check_at_least("batch_size", batch_size, 1)
        for numbers, table in ParquetRows(self.folder / HELD_OUT_FILE).batches(batch_size):
            yield self._collate(0, torch.from_numpy(numbers), table)

    def _collate(self, step: int, sample_ids: Tensor, table: pa.Table) -> ImpressionBatch:
        past, items = _lists(table, "item")
        shown, exposed = _lists(table, "shown")
        features = {"history": Lookup(items, past), "exposed": Lookup(exposed, shown)}
        for name in self.context:
            features[name] = Lookup(torch.from_numpy(table[f"context_{name}"].to_numpy().copy()))
        times = [_lists(table, name)[1] for name in ("timestamp", "shown_timestamp")]
        return ImpressionBatch(
            step=step,
            sample_ids=sample_ids,
            features=KeyedJaggedTensor.from_dict(features),
            history_actions=_lists(table, "action")[1],
            timestamps=torch.cat(times),
            labels=_lists(table, "label")[1].view(-1, len(self.tasks)),
            genres=None if self._genres is None else _bags(self._genres, torch.cat([items, exposed])),
            tasks=self.tasks,
        )


def _bags(genres: ItemGenres, items: Tensor) -> KeyedJaggedTensor:
    """The genres of items (n,) int64, a bag for each."""
    starts, lengths = map(torch.from_numpy, genres.of(items.numpy()))
    ids, offsets = token_indices(starts, lengths)
    return KeyedJaggedTensor(("genre",), torch.from_numpy(genres.genres)[ids], offsets)


def _lists(table: pa.Table, name: str) -> tuple[Tensor, Tensor]:
    """Offsets (b + 1,) and values of a column of lists, int64."""
    import pyarrow as pa

    column = table.column(name).combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    lengths = np.asarray(column.value_lengths(), dtype=np.int64)
    offsets = np.append(0, np.cumsum(lengths))
    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    return torch.from_numpy(offsets), torch.from_numpy(values)
