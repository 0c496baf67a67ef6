"""DLRM with table-wise sharding: each table is on one rank (arXiv 2512.19342, section I).

Every rank has the whole batch of B samples, and owns a block of consecutive ones. It looks up the rows of all
B samples in its own tables, and sends to every rank the rows of that rank's samples. With two ranks, B = 3,
the features a, b on rank 0 and c on rank 1::

    sample      rank 0 looks up      rank 1 looks up
      0            a0  b0                c0            needed by rank 0, which owns samples 0 and 1
      1            a1  b1                c1
      2            a2  b2                c2            needed by rank 1

    rank 0 sends [a0 b0 a1 b1 | a2 b2], counts [4, 2], and gets [a0 b0 a1 b1 | c0 c1], counts [4, 2]
    rank 1 sends [c0 c1 | c2],          counts [2, 1], and gets [a2 b2 | c2],         counts [2, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from ..kernels.arguments import check_rank
from ..nn import DLRM, sigmoid
from ..nn.dlrm import ClickInput


def own_samples(samples: int, rank: int, world_size: int) -> slice:
    """The block of a batch's `samples` that a rank owns; the first ranks may have one more.

    Raises ValueError for a rank that is not in [0, world_size).
    """
    check_rank(rank, world_size)
    return slice(*(at * (samples // world_size) + min(at, samples % world_size) for at in (rank, rank + 1)))


class ServedBatch(ClickInput, Protocol):
    """The interface of a served batch, as `tritonrec.data.ClickBatch`."""

    @property
    def features(self) -> Any: ...  # a `KeyedJaggedTensor`

    def lookups(self) -> Mapping[str, Any]: ...  # by feature ``ids`` (B,) int64


class TableWiseDLRM:
    """A `ServedModel`: DLRM with the tables of this rank's features.

    Args:
        model: the same weights on every rank.
        owners: the rank of each feature's table, the same everywhere; see `tritonrec.nn.partition_tables`.
        tables: ids (n,) int64 -> rows (n, d), for the features this rank owns.
        rank, world_size: of the exchange.

    Raises ValueError for a rank or an owner that is not in [0, world_size), a feature without an owner, or a
    missing table.
    """

    def __init__(
        self,
        model: DLRM,
        owners: Mapping[str, int],
        tables: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
        rank: int,
        world_size: int,
    ):
        check_rank(rank, world_size)
        features = model.config.features
        for name in features:
            if not 0 <= owners.get(name, -1) < world_size:
                raise ValueError(
                    f"feature {name!r} needs an owner in [0, {world_size}), got {owners.get(name)}"
                )
        self.features = [[name for name in features if owners[name] == each] for each in range(world_size)]
        missing = [name for name in self.features[rank] if name not in tables]
        if missing:
            raise ValueError(f"rank {rank} owns the feature {missing[0]!r} but was given no table for it")
        self.model, self.tables, self.rank, self.world_size = model, tables, rank, world_size

    def capacity(self, samples: int) -> int:
        """Bytes of the largest message for batches of at most `samples`, on any rank."""
        largest = max(len(names) for names in self.features)
        block = own_samples(samples, 0, self.world_size)
        return largest * block.stop * self.model.config.dim * torch.float32.itemsize

    def lookup(self, batch: ServedBatch) -> tuple[torch.Tensor, list[int]]:
        """Rows (B * own features, d) float32, sample by sample, and the number for each rank."""
        names = self.features[self.rank]
        samples, lookups = len(batch.dense), batch.lookups()
        if not batch.features.is_dense:
            raise ValueError(
                "a served batch needs one id of each feature for each sample: validate() names the others"
            )
        values = batch.dense.new_empty(0, self.model.config.dim)
        if names:
            values = torch.stack([self.tables[name](lookups[name].ids) for name in names], 1).flatten(0, 1)
        blocks = (own_samples(samples, rank, self.world_size) for rank in range(self.world_size))
        return values, [(block.stop - block.start) * len(names) for block in blocks]

    def bottom(self, batch: ServedBatch) -> torch.Tensor | None:
        """(b, d) for the b samples of this rank."""
        return self.model.bottom_vectors(batch.dense[self._own(batch)])

    def top(
        self, batch: ServedBatch, x: torch.Tensor | None, rows: torch.Tensor, counts: list[int]
    ) -> torch.Tensor:
        """Probabilities (b,) of a click for the samples of this rank."""
        own = self._own(batch)
        by_name = {}
        for names, part in zip(self.features, rows.split(counts), strict=True):
            vectors = part.view(own.stop - own.start, len(names), self.model.config.dim)
            by_name.update({name: vectors[:, at] for at, name in enumerate(names)})
        return sigmoid(self.model.top_logits(x, by_name)).squeeze(1)

    def _own(self, batch: ServedBatch) -> slice:
        return own_samples(len(batch.dense), self.rank, self.world_size)
