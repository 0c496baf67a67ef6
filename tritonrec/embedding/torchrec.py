"""TorchRec's embedding modules over dynamic tables: names, arguments and results of TorchRec.

A script whose batches are made by ``KeyedJaggedTensor.from_lengths_sync`` runs after a change of its import::

    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from tritonrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

Rows are updated in backward passes, as TorchRec's sharded modules do (``fused=False`` leaves that to a
`HashOptimizer`). What TorchRec's own jagged tensors look up comes back as TorchRec's own types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any

import torch

from ..data.jagged import KeyedJaggedTensor
from .features import FeatureConfig, Pooling
from .modules import HashEmbeddingCollection
from .policy import TablePolicy
from .row_optimizer import RowOptimizer


class PoolingType(Enum):
    """Of `EmbeddingBagConfig`."""

    SUM = "SUM"
    MEAN = "MEAN"


@dataclass
class EmbeddingConfig:
    """A table and the features that look it up.

    Args:
        num_embeddings: not needed: a table has the rows of the ids that it has seen. `policy` bounds them.
        embedding_dim: columns. name: of the table. feature_names: by default the table's name.
        weight_init_min, weight_init_max: bounds of uniform initial weights, -scale and scale; by default
            ``embedding_dim ** -0.5``.
        optimizer: of the table's rows, by default the module's. policy: see `TablePolicy`.
    """

    num_embeddings: int = 0
    embedding_dim: int = 0
    name: str = ""
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    optimizer: RowOptimizer | None = None
    policy: TablePolicy | None = None


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """`EmbeddingConfig` and how the rows of a bag are pooled."""

    pooling: PoolingType = PoolingType.SUM


@dataclass(frozen=True)
class JaggedTensor:
    """Rows (n, dim) of a feature's ids, sample by sample, under TorchRec's names."""

    _values: torch.Tensor
    _offsets: torch.Tensor

    def values(self) -> torch.Tensor:
        """(n, dim) float32."""
        return self._values

    def offsets(self) -> torch.Tensor:
        """(B + 1,) int64."""
        return self._offsets

    def lengths(self) -> torch.Tensor:
        """(B,) int64."""
        return self._offsets.diff()

    def to_dense(self) -> list[torch.Tensor]:
        """The rows of each sample."""
        return list(self._values.split(self.lengths().tolist()))


@dataclass(frozen=True)
class KeyedTensor:
    """Pooled rows (B, dim) of each feature side by side, under TorchRec's names."""

    _keys: list[str]
    _length_per_key: list[int]
    _values: torch.Tensor

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def values(self) -> torch.Tensor:
        """(B, sum of dims) float32."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Columns of each feature."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Where the columns of each feature begin, and their number."""
        return [0, *accumulate(self._length_per_key)]

    def to_dict(self) -> dict[str, torch.Tensor]:
        """(B, dim) by feature."""
        return dict(zip(self._keys, self._values.split(self._length_per_key, 1), strict=True))

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.to_dict()[key]


class _Collection(torch.nn.Module):
    """What both collections share."""

    def __init__(
        self, tables: Sequence[Any], optimizer: RowOptimizer | None, fused: bool, options: Mapping[str, Any]
    ):
        super().__init__()
        self.feature_names = [name for table in tables for name in _features_of(table)]
        self.embeddings = HashEmbeddingCollection(
            [_feature(table, name, optimizer) for table in tables for name in _features_of(table)],
            optimizer,
            fused=fused,
            **options,
        )

    @property
    def fused_optimizer(self) -> Any:
        """The `HashOptimizer` of ``fused`` rows."""
        return self.embeddings.fused_optimizer


class EmbeddingCollection(_Collection):
    """TorchRec's ``EmbeddingCollection``: a row for every id.

    Args:
        tables: `EmbeddingConfig`, or TorchRec's. device: for compatibility; see `Placement`.
        optimizer: update rule of the rows. fused: in the backward pass.
        options: see `HashEmbeddingCollection`.

    Raises ValueError for a feature of two tables.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        device: Any = None,
        *,
        optimizer: RowOptimizer | None = None,
        fused: bool = True,
        **options: Any,
    ):
        super().__init__(tables, optimizer, fused, options)

    def forward(self, features: Any) -> dict[str, Any]:
        """By feature a `JaggedTensor` of rows (n, dim), or TorchRec's for TorchRec's input."""
        kind, own = _input(features)
        rows, lookups = self.embeddings(own), own.to_dict()
        found = {}
        for name in self.feature_names:
            offsets = lookups[name].offsets
            assert offsets is not None
            if kind is None:
                found[name] = JaggedTensor(rows[name], offsets)
            else:
                found[name] = kind.JaggedTensor(values=rows[name], lengths=offsets.diff(), offsets=offsets)
        return found


class EmbeddingBagCollection(_Collection):
    """TorchRec's ``EmbeddingBagCollection``: one pooled row for each feature and sample.

    Args:
        tables: `EmbeddingBagConfig`, or TorchRec's. is_weighted: weights are not supported.
        device: for compatibility; see `Placement`.
        optimizer: update rule of the rows. fused: in the backward pass.
        options: see `HashEmbeddingCollection`.

    Raises ValueError for a feature of two tables.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        is_weighted: bool = False,
        device: Any = None,
        *,
        optimizer: RowOptimizer | None = None,
        fused: bool = True,
        **options: Any,
    ):
        if is_weighted:
            raise ValueError("weighted bags are not supported: multiply the rows of an EmbeddingCollection")
        super().__init__(tables, optimizer, fused, options)

    def forward(self, features: Any) -> Any:
        """A `KeyedTensor` (B, sum of dims), or TorchRec's for TorchRec's input."""
        kind, own = _input(features)
        rows = self.embeddings(own)
        dims = [rows[name].shape[1] for name in self.feature_names]
        values = torch.cat([rows[name] for name in self.feature_names], 1)
        return (KeyedTensor if kind is None else kind.KeyedTensor)(self.feature_names, dims, values)


def _features_of(table: Any) -> list[str]:
    return table.feature_names or [table.name]


def _feature(table: Any, name: str, optimizer: RowOptimizer | None) -> FeatureConfig:
    low, high = table.weight_init_min, table.weight_init_max
    if (low is None) != (high is None) or (high is not None and low != -high):
        raise ValueError(
            f"table {table.name!r}: initial weights are uniform in [-scale, scale): give weight_init_min="
            f"-weight_init_max, got {low} and {high}"
        )
    pooling: dict[str, Pooling] = {"SUM": "sum", "MEAN": "mean"}
    return FeatureConfig(
        name,
        table.embedding_dim,
        table.name,
        pooling[table.pooling.value] if hasattr(table, "pooling") else "none",
        high,
        getattr(table, "optimizer", None) or optimizer,
        getattr(table, "policy", None) or TablePolicy(),
    )


def _input(features: Any) -> tuple[Any, KeyedJaggedTensor]:
    """The module of the result's types, None for ours, and the features as ours."""
    if isinstance(features, KeyedJaggedTensor):
        return None, features
    import torchrec

    return torchrec, KeyedJaggedTensor.from_torchrec(features)
