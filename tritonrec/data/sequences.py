"""Users' sequences as Parquet, a row each, streamed as samples of next-item training.

::

    OUT/part-00000.parquet     user         integer                     a row is one user's sequence in the
    OUT/part-00001.parquet     item         list of integers            order of time; lists of a row are of
                               timestamp    list of integers            one length
                               rating       list of numbers             if there is one
    OUT/_catalogue.parquet     item, count  integers                    items in training, ascending

``python -m tritonrec.data.convert SOURCE OUT --sequences`` writes it. Other columns are ignored, and of these
only ``item`` and ``timestamp`` are read. A user may have several rows; each is a sample. The last item of a
row of at least two is held out for evaluation, or what another `Split` says; samples are cut as in
`tritonrec.data.loader`, but a row that is too short for a label is a sample without tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tritonrec.data.batch import JaggedBatch
from tritonrec.data.epochs import check_at_least, digest_of
from tritonrec.data.jagged import token_indices
from tritonrec.data.loader import LEAVE_ONE_OUT, EvaluationBatch, NextItems, trained_part
from tritonrec.data.slices import work
from tritonrec.data.splits import NO_PART, Part, Split, held_out
from tritonrec.data.stream import Stream
from tritonrec.settings import typed

if TYPE_CHECKING:
    import pyarrow as pa

    from tritonrec.data.parquet_rows import ParquetRows

CATALOGUE_FILE = "_catalogue.parquet"
COLUMNS = ("item", "timestamp")
HINT = "python -m tritonrec.data.convert SOURCE OUT --sequences makes them of a log"


@typed
class NextItemStream(NextItems, Stream[JaggedBatch]):
    """Next-item training, and evaluation of held-out items, from Parquet rows of sequences.

    Args:
        rows: the path of a dataset with list columns ``item`` and ``timestamp``, or a `ParquetRows` of these,
            or a frame with them.
        batch_size, seed, rank, world_size, shuffle, buffer_rows, readers: see `Stream`.
        max_seq_len: largest number of tokens of a sample.
        num_negatives: K, sampled uniformly from the catalogue for each token; one may equal the label.
        catalogue: (I,) int64, distinct and ascending, the items that negatives are drawn from and that are
            ranked; by default ``_catalogue.parquet`` in the folder `rows`. popularity: (I,) int64, their
            occurrences.
        split: see `NextItemLoader`. With another one than the default, and no `catalogue`, all rows are read
            once for the items in training.

    Raises the errors of `Stream`, and ValueError for columns that are no lists of integers, and where there
    is no catalogue, or no sequence with a token.
    """

    def __init__(
        self,
        rows: ParquetRows | str | Path,
        batch_size: int,
        max_seq_len: int,
        num_negatives: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        catalogue: Tensor | None = None,
        popularity: Tensor | None = None,
        shuffle: bool = True,
        buffer_rows: int = 1 << 18,
        readers: int = 64,
        split: Split = LEAVE_ONE_OUT,
    ) -> None:
        from tritonrec.data.parquet_rows import ParquetRows

        check_at_least("max_seq_len", max_seq_len, 1)
        check_at_least("num_negatives", num_negatives, 0)
        split.check_streamed()
        rows = rows if isinstance(rows, ParquetRows) else ParquetRows(rows, COLUMNS)
        rows.check(COLUMNS, (), HINT)
        super().__init__(rows, None, batch_size, seed, rank, world_size, shuffle, buffer_rows, readers)
        self.max_seq_len, self.num_negatives, self.split = max_seq_len, num_negatives, split
        if catalogue is None:
            catalogue, popularity = read_catalogue(rows) if split == LEAVE_ONE_OUT else self._count_items()
        elif catalogue.dtype != torch.int64 or bool((catalogue.diff() <= 0).any()):
            raise ValueError("catalogue must be int64, distinct and ascending: sort it with torch.unique")
        self.catalogue = catalogue
        self.popularity = torch.ones_like(catalogue) if popularity is None else popularity
        tables = (self._lists(table, numbers) for numbers, table in rows.batches())
        if not any(self._tokens(*lists)[1].any() for lists in tables):  # mostly the first ones have some
            raise ValueError(
                f"{rows.path}: none of the {rows.num_rows} sequences has two events for training, which make "
                f"one token ({split})"
            )

    def tokens_of(self, table: pa.Table) -> np.ndarray:
        """(b,) int64: tokens of each row's sample."""
        return self._tokens(*self._lists(table))[1].numpy()

    def _lists(
        self, table: pa.Table, numbers: np.ndarray | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Those of `lists_of`, whose errors name the dataset and the row, where its number is known."""
        return lists_of(table, self.rows.path, numbers)

    def _counts(self, timestamps: Tensor, lengths: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Offsets (b + 1,) of the rows' events, and of each row (b,) those in training and validation."""
        offsets = np.append(0, np.cumsum(lengths.numpy()))
        return offsets, *self.split.counts(offsets, timestamps.numpy())

    def _tokens(
        self, items: Tensor, timestamps: Tensor, starts: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of each row (b,): training items, and tokens."""
        trained = torch.from_numpy(self._counts(timestamps, lengths)[1])
        return trained, (trained - 1).clamp(min=0, max=self.max_seq_len)

    def _count_items(self) -> tuple[Tensor, Tensor]:
        """The items in training (I,) ascending, and their occurrences (I,): a pass over all rows."""
        items, counts = (
            torch.empty(0, dtype=torch.int64, device="cpu"),
            torch.empty(0, dtype=torch.int64, device="cpu"),
        )
        for _numbers, table in self.rows.batches(1 << 14):
            found, timestamps, starts, lengths = self._lists(table)
            trained = torch.from_numpy(self._counts(timestamps, lengths)[1])
            own, times = torch.unique(found[token_indices(starts, trained)[0]], return_counts=True)
            items, places = torch.unique(torch.cat([items, own]), return_inverse=True)
            counts = torch.zeros_like(items).index_add_(0, places, torch.cat([counts, times]))
        if not len(items):
            raise ValueError(f"{self.rows.path}: {self.split} leaves no event for training")
        return items, counts

    def identity(self) -> dict[str, Any]:
        sizes = {"max_seq_len": self.max_seq_len, "num_negatives": self.num_negatives}
        return {
            **super().identity(),
            **sizes,
            "split": str(self.split),
            "catalogue": digest_of(self.catalogue),
        }

    def collate(self, step: int, sample_ids: Tensor, table: pa.Table) -> JaggedBatch:
        items, timestamps, starts, lengths = self._lists(table, sample_ids.numpy())
        trained, kept = self._tokens(items, timestamps, starts, lengths)
        batch = trained_part(step, sample_ids, items, timestamps, starts + trained - 1 - kept, kept)
        with work("negatives"):
            return self.with_negatives(batch)

    def evaluation_batches(self, batch_size: int = 256, part: Part = "test") -> Iterator[EvaluationBatch]:
        """As of its base, in the order of rows, which are read again."""
        check_at_least("batch_size", batch_size, 1)
        found = 0
        for numbers, table in self.rows.batches(batch_size):
            items, timestamps, starts, lengths = self._lists(table, numbers)
            rows, places = held_out(*self._counts(timestamps, lengths), part)
            found += len(rows)
            for first in range(0, len(rows), batch_size):
                own = torch.from_numpy(rows[first : first + batch_size])
                before = torch.from_numpy(places[first : first + batch_size])
                ids = torch.from_numpy(numbers)[own]
                yield self.evaluated(ids, items, timestamps, starts[own], before)
        if not found:
            raise ValueError(f"{self.rows.path}: no event is held out for {part}: {NO_PART}")


def lists_of(
    table: pa.Table, path: str = "the table", numbers: np.ndarray | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Items (L,) and timestamps (L,), and the start and length (b,) of each row's; all int64.

    Args:
        path, numbers: of the rows (b,), for errors.

    Raises ValueError for nulls, for rows whose lists differ in length or whose times fall, and for values
    beyond int64.
    """
    from tritonrec.data.times import lists
    from tritonrec.data.values import Part

    part = Part(path, "row", 0 if numbers is None else numbers)
    items, lengths = lists(part, "item", table.column("item"))
    timestamps, of_times = lists(part, "timestamp", table.column("timestamp"))
    if not np.array_equal(lengths, of_times):
        row = int((lengths != of_times).nonzero()[0][0])
        raise ValueError(
            f"{path}, row {part.number(row)}: a row has {lengths[row]} values in 'item' and {of_times[row]} "
            "in 'timestamp': its lists must be of one length"
        )
    falls = np.append(False, timestamps[1:] < timestamps[:-1])
    falls[np.cumsum(lengths)[:-1][lengths[1:] > 0]] = False  # between two rows
    if falls.any():
        row = int(np.searchsorted(np.cumsum(lengths), falls.argmax(), side="right"))
        raise ValueError(f"{path}, row {part.number(row)}: the times of a row fall: sort its lists by time")
    return (
        torch.from_numpy(items),
        torch.from_numpy(timestamps),
        torch.from_numpy(np.cumsum(lengths) - lengths),
        torch.from_numpy(lengths),
    )


def holds_sequences(schema: pa.Schema) -> bool:
    """Whether a dataset of this schema has rows of sequences, rather than of events."""
    from tritonrec.data.values import is_list, plain_type

    return "item" in schema.names and is_list(plain_type(schema.field("item").type))


def read_catalogue(rows: ParquetRows) -> tuple[Tensor, Tensor]:
    """Items (I,) ascending and their occurrences (I,), int64, from the folder of a dataset.

    Raises ValueError where the file is missing or has other columns.
    """
    import pyarrow.parquet as pq

    from tritonrec.data.log_files import is_there
    from tritonrec.data.text_tables import UNREADABLE
    from tritonrec.data.values import Part, integers

    file = f"{rows.root}/{CATALOGUE_FILE}"
    is_there(rows.filesystem, file)  # a pipe would be waited for
    try:
        with rows.filesystem.open_input_file(file) as source:
            table = pq.read_table(source, columns=["item", "count"], page_checksum_verification=True)
    except UNREADABLE as error:
        raise ValueError(
            f"{rows.path}: no catalogue to draw negatives from: give catalogue=, or write the data with "
            f"python -m tritonrec.data.convert SOURCE OUT --sequences ({error})"
        ) from error
    columns = [integers(Part(file, "row", 0), name, table.column(name)) for name in ("item", "count")]
    return torch.from_numpy(columns[0].copy()), torch.from_numpy(columns[1].copy())
