"""Training from rows on disk as one would write it with torch and a store: the peers of `measure_disk.py`.

A step reads the rows of its distinct ids, computes, updates them by Adam and writes them back; rows have the
weights and Adam's two moments. ``mmap`` is numpy's map of one file; ``lmdb`` and ``rocksdb`` are packages to
install (`pip install lmdb rocksdict`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tritonrec.data import Batch

DIM, WIDTH = 64, 192
BETAS, EPS = (0.9, 0.999), 1e-8


class Store(Protocol):
    def read(self, ids: np.ndarray) -> np.ndarray:
        """Rows (n, WIDTH) float32 of distinct ids."""

    def write(self, ids: np.ndarray, rows: np.ndarray) -> None: ...


class Mapped:
    def __init__(self, folder: Path, rows: int, memory: int):
        self._rows = np.memmap(folder / "rows", np.float32, "w+", shape=(rows, WIDTH))

    def read(self, ids: np.ndarray) -> np.ndarray:
        return self._rows[ids]

    def write(self, ids: np.ndarray, rows: np.ndarray) -> None:
        self._rows[ids] = rows


class Lmdb:
    def __init__(self, folder: Path, rows: int, memory: int):
        import lmdb

        # No call waits for the disk: like our table, it is made anew from a checkpoint.
        self._store = lmdb.open(
            str(folder / "lmdb"), map_size=8 * rows * WIDTH * 4, sync=False, writemap=True
        )

    def read(self, ids: np.ndarray) -> np.ndarray:
        with self._store.begin(buffers=True) as of, of.cursor() as cursor:
            found = cursor.getmulti([each.tobytes() for each in ids.astype(">i8")])
            return np.stack([np.frombuffer(row, np.float32) for _, row in found])

    def write(self, ids: np.ndarray, rows: np.ndarray) -> None:
        with self._store.begin(write=True) as to, to.cursor() as cursor:
            cursor.putmulti(
                [(each.tobytes(), row.tobytes()) for each, row in zip(ids.astype(">i8"), rows, strict=True)]
            )


class RocksDb:
    def __init__(self, folder: Path, rows: int, memory: int):
        from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteBatch, WriteOptions

        options, blocks = Options(raw_mode=True), BlockBasedOptions()
        blocks.set_block_cache(Cache(memory // 2))  # half for blocks, half for what is written
        blocks.set_bloom_filter(10, False)
        options.set_block_based_table_factory(blocks)
        options.set_db_write_buffer_size(memory // 2)
        options.create_if_missing(True)
        self._store, self._batch, self._unlogged = (
            Rdict(str(folder / "rocks"), options),
            WriteBatch,
            WriteOptions(),
        )
        self._unlogged.disable_wal = True

    def read(self, ids: np.ndarray) -> np.ndarray:
        return np.stack(
            [np.frombuffer(row, np.float32) for row in self._store[[i.tobytes() for i in ids.astype(">i8")]]]
        )

    def write(self, ids: np.ndarray, rows: np.ndarray) -> None:
        batch = self._batch(raw_mode=True)
        for each, row in zip(ids.astype(">i8"), rows, strict=True):
            batch.put(each.tobytes(), row.tobytes())
        self._store.write(batch, self._unlogged)


STORES: dict[str, type[Any]] = {"mmap": Mapped, "lmdb": Lmdb, "rocksdb": RocksDb}


def trained(
    store: Store, layers: torch.nn.ModuleList, rate: float, batches: Iterable[Batch]
) -> Iterator[torch.Tensor]:
    """Losses (B,) of the steps of one plain loop."""
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)
    for update, batch in enumerate(batches, 1):
        lookup = batch.lookups()["item"]
        ids, inverse = lookup.ids.unique(return_inverse=True)
        keys = ids.numpy()
        rows = torch.from_numpy(store.read(keys))
        weights, mean, square = (part.clone() for part in rows.split(DIM, 1))
        weights.requires_grad_()
        values = torch.nn.functional.embedding_bag(inverse, weights, lookup.offsets[:-1], mode="sum")
        for layer in layers:
            values = torch.tanh(layer(values))
        losses = values.sum(1)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        with torch.no_grad():
            mean.lerp_(weights.grad, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(weights.grad, weights.grad, value=1 - BETAS[1])
            unbiased = [1 - beta**update for beta in BETAS]
            weights -= rate * (mean / unbiased[0]) / ((square / unbiased[1]).sqrt() + EPS)
            store.write(keys, torch.cat([weights, mean, square], 1).numpy())
        yield losses.detach()
