"""TorchRec's embedding modules over dynamic tables: names, arguments and results of TorchRec.

A script whose batches are made by ``KeyedJaggedTensor.from_lengths_sync`` runs after a change of its import::

    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from tritonrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

Rows are updated in backward passes, as TorchRec's sharded modules do (``fused=False`` leaves that to a
`HashOptimizer`). What TorchRec's own jagged tensors look up comes back as TorchRec's own types. A feature of
several tables has a result for each of them, ``"feature@table"``.

`torch.fx` traces both collections; TorchScript has no types for tables that grow (`tracing.UNSCRIPTABLE`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any

import torch

from ..data.jagged import KeyedJaggedTensor, Lookup
from ..embedding.modules import UNSCRIPTABLE, HashEmbeddingCollection
from ..embedding.policy import TablePolicy
from ..embedding.row_optimizer import RowOptimizer
from ..settings import typed
from .configs import check_tables, embedding_names, features_of_tables, fill_by_init_fn


class PoolingType(Enum):
    """Of `EmbeddingBagConfig`."""

    SUM = "SUM"
    MEAN = "MEAN"


class DataType(Enum):
    """Of `EmbeddingConfig`: rows are float32."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"


@typed
@dataclass
class EmbeddingConfig:
    """A table and the features that look it up.

    Args:
        num_embeddings: for `init_fn` only: a table has the rows of the ids that it has seen. `policy` bounds
            them.
        embedding_dim: columns. name: of the table. feature_names: by default the table's name.
        weight_init_min, weight_init_max: bounds of uniform initial weights, -scale and scale; by default
            ``embedding_dim ** -0.5``.
        data_type: FP32; see `TablePolicy` for rows in 16 bits.
        init_fn: fills weights (num_embeddings, embedding_dim) in place: the rows of ids 0 up to
            num_embeddings are made at once, with these. ``partial(uniform_, a=-scale, b=scale)`` of
            `torch.nn.init` makes none; it is the scale of all initial weights.
        optimizer: of the table's rows, by default the module's. policy: see `TablePolicy`.
    """

    num_embeddings: int = 0
    embedding_dim: int = 0
    name: str = ""
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    data_type: Any = DataType.FP32
    init_fn: Callable[[torch.Tensor], Any] | None = None
    optimizer: RowOptimizer | None = None
    policy: TablePolicy | None = None


@typed
@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """`EmbeddingConfig` and how the rows of a bag are pooled."""

    pooling: PoolingType = PoolingType.SUM


@dataclass(frozen=True)
class JaggedTensor:
    """Rows (n, dim) of a feature's ids, sample by sample, under TorchRec's names."""

    _values: torch.Tensor
    _offsets: torch.Tensor
    _weights: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """(n, dim) float32."""
        return self._values

    def offsets(self) -> torch.Tensor:
        """(B + 1,) int64."""
        return self._offsets

    def lengths(self) -> torch.Tensor:
        """(B,) int64."""
        return self._offsets.diff()

    def weights(self) -> torch.Tensor:
        """(n,) int64, the ids of the rows; ValueError without ``need_indices``."""
        if self._weights is None:
            raise ValueError(
                "there are no weights: EmbeddingCollection(..., need_indices=True) has ids there"
            )
        return self._weights

    def weights_or_none(self) -> torch.Tensor | None:
        """`weights`, or None."""
        return self._weights

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
        self,
        tables: Sequence[Any],
        device: Any,
        is_weighted: bool,
        optimizer: RowOptimizer | None,
        fused: bool,
        options: Mapping[str, Any],
    ):
        super().__init__()
        check_tables(tables)
        self._configs, self._is_weighted = list(tables), is_weighted
        self._device = torch.get_default_device() if device is None else torch.device(device)
        self._names_by_table = embedding_names(tables)
        self.feature_names = [name for names in self._names_by_table for name in names]
        found = features_of_tables(tables, optimizer)
        self._input_of = dict(zip(self.feature_names, (name for _, name in found), strict=True))
        with torch.device("cpu"):  # a default device is not that of the tables
            self.embeddings = HashEmbeddingCollection(
                [feature for feature, _ in found], optimizer, fused=fused, **options
            )
        if self._device.type != "meta":
            fill_by_init_fn(tables, self.embeddings)

    @property
    def device(self) -> torch.device:
        """Of the arguments, by default torch's; tables are where their `Placement` says."""
        return self._device

    @property
    def fused_optimizer(self) -> Any:
        """The `HashOptimizer` of ``fused`` rows."""
        return self.embeddings.fused_optimizer

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of a module, but after an error no row has changed."""
        others = [name for name in state_dict if not name.startswith("embeddings.")]
        if strict and others:
            raise RuntimeError(f"Unexpected key(s) in state_dict: {', '.join(others)}; nothing was loaded")
        return super().load_state_dict(state_dict, strict, assign)

    def embedding_names_by_table(self) -> list[list[str]]:
        """Names of each table's results: features, or ``"feature@table"``."""
        return self._names_by_table

    def __prepare_scriptable__(self) -> None:
        raise TypeError(UNSCRIPTABLE)


class EmbeddingCollection(_Collection):
    """TorchRec's ``EmbeddingCollection``: a row for every id.

    Args:
        tables: `EmbeddingConfig`, or TorchRec's. device: what `device` returns; see `Placement`.
        need_indices: the results' ``weights()`` are the ids.
        optimizer: update rule of the rows. fused: in the backward pass.
        options: see `HashEmbeddingCollection`.

    Raises ValueError for two tables of one name.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        device: Any = None,
        need_indices: bool = False,
        *,
        optimizer: RowOptimizer | None = None,
        fused: bool = True,
        **options: Any,
    ):
        super().__init__(tables, device, False, optimizer, fused, options)
        self._need_indices = need_indices

    def forward(self, features: Any) -> dict[str, Any]:
        """By name a `JaggedTensor` of rows (n, dim), or TorchRec's for TorchRec's input.

        Raises ValueError on the meta device, where the number of a feature's ids is not known.
        """
        if self._device.type == "meta":
            raise ValueError("an EmbeddingCollection on the meta device has no results: n is not known there")
        lookups = _lookups(features, self._input_of, False)
        rows = self.embeddings(lookups)
        return _jagged_tensors(rows, lookups, features, self.feature_names, self._need_indices)

    def embedding_configs(self) -> list[Any]:
        """`tables`."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether results have their ids."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Columns of every table; ValueError where they differ."""
        dims = {table.name: table.embedding_dim for table in self._configs}
        if len(set(dims.values())) > 1:
            raise ValueError(f"the tables have different dimensions, {dims}")
        return int(self._configs[0].embedding_dim)


class EmbeddingBagCollection(_Collection):
    """TorchRec's ``EmbeddingBagCollection``: one pooled row for each feature and sample.

    Args:
        tables: `EmbeddingBagConfig`, or TorchRec's.
        is_weighted: bags are sums weighted by the input's weights, which are left out otherwise.
        device: what `device` returns; see `Placement`. On ``"meta"`` results are, and no row is looked up.
        optimizer: update rule of the rows. fused: in the backward pass.
        options: see `HashEmbeddingCollection`.

    Raises ValueError for two tables of one name, and for weighted means.
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
        for table in tables:
            if is_weighted and table.pooling.value != "SUM":
                raise ValueError(f"table {table.name!r}: bags are weighted sums, there are no weighted means")
        super().__init__(tables, device, is_weighted, optimizer, fused, options)
        self._dims = [
            table.embedding_dim
            for table, names in zip(tables, self._names_by_table, strict=True)
            for _ in names
        ]

    def forward(self, features: Any) -> Any:
        """A `KeyedTensor` (B, sum of dims), or TorchRec's for TorchRec's input.

        Raises ValueError for ``is_weighted`` and an input without weights.
        """
        if self._device.type == "meta":
            return _empty_keyed_tensor(features, self.feature_names, self._dims)
        rows = self.embeddings(_lookups(features, self._input_of, self._is_weighted))
        return _keyed_tensor(rows, features, self.feature_names, self._dims)

    def embedding_bag_configs(self) -> list[Any]:
        """`tables`."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether bags are weighted."""
        return self._is_weighted


# Functions of a traced forward pass, each a node of its graph.


@torch.fx.wrap
def _lookups(features: Any, input_of: Mapping[str, str], is_weighted: bool) -> dict[str, Any]:
    """Lookups by name of the result, of which the weights are left out unless `is_weighted`."""
    own = features
    if not isinstance(features, KeyedJaggedTensor):
        own = KeyedJaggedTensor.from_torchrec(features)
    if is_weighted and own.weights is None:
        raise ValueError(f"bags are weighted, and features {list(own.keys)} have no weights")
    given = own.to_dict()
    missing = sorted(set(input_of.values()) - given.keys())
    if missing:
        raise ValueError(f"the input has features {list(given)}, and the module needs {missing} too")
    if is_weighted:
        return {name: given[feature] for name, feature in input_of.items()}
    return {name: Lookup(*given[feature][:2]) for name, feature in input_of.items()}


@torch.fx.wrap
def _jagged_tensors(
    rows: dict[str, torch.Tensor],
    lookups: dict[str, Lookup],
    features: Any,
    names: list[str],
    need_indices: bool,
) -> dict[str, Any]:
    kind, found = _types_for(features), {}
    for name in names:
        ids, offsets = lookups[name]
        assert offsets is not None
        weights = ids if need_indices else None
        if kind is None:
            found[name] = JaggedTensor(rows[name], offsets, weights)
        else:
            found[name] = kind.JaggedTensor(
                values=rows[name], weights=weights, lengths=offsets.diff(), offsets=offsets
            )
    return found


@torch.fx.wrap
def _keyed_tensor(rows: dict[str, torch.Tensor], features: Any, names: list[str], dims: list[int]) -> Any:
    kind = _types_for(features)
    values = torch.cat([rows[name] for name in names], 1)
    return (KeyedTensor if kind is None else kind.KeyedTensor)(list(names), list(dims), values)


@torch.fx.wrap
def _empty_keyed_tensor(features: Any, names: list[str], dims: list[int]) -> Any:
    kind = _types_for(features)
    samples = features.num_samples if kind is None else features.stride()
    values = torch.empty(samples, sum(dims), dtype=torch.float32, device="meta")
    return (KeyedTensor if kind is None else kind.KeyedTensor)(list(names), list(dims), values)


def _types_for(features: Any) -> Any:
    """The module of the result's types, None for ours."""
    if isinstance(features, KeyedJaggedTensor):
        return None
    import torchrec

    return torchrec
