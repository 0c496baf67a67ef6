"""`HashEmbedding` and `HashEmbeddingBag`: one dynamic table under the interface of torch's modules."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..data.jagged import KeyedJaggedTensor, Lookup, WeightedLookup
from ..settings import typed
from .bags import Pooling
from .features import FeatureConfig
from .modules import HashEmbeddingCollection, leaf_call
from .policy import Placement, TablePolicy
from .row_optimizer import RowOptimizer


@typed
class HashEmbedding(HashEmbeddingCollection):
    """`torch.nn.Embedding` over any int64 ids: one row each, made when its id is first seen in training.

    Args:
        dim: columns of an embedding.
        optimizer: update rule of the rows, used by `HashOptimizer`.
        name: of the table, which initial values depend on beside the seed.
        scale, policy: see `FeatureConfig`. options: see `HashEmbeddingCollection`.
    """

    def __init__(
        self,
        dim: int,
        optimizer: RowOptimizer | None = None,
        *,
        name: str = "embedding",
        scale: float | None = None,
        policy: TablePolicy | None = None,
        placement: Placement | None = None,
        **options: Any,
    ):
        feature = _only_feature(name, dim, "none", scale, policy)
        super().__init__([feature], optimizer, placement=placement, **options)
        self.name, self.dim = name, dim

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Embeddings (*shape, dim) float32 of ids (*shape) int64.

        Raises TypeError for another dtype, ValueError for ids on another device than before.
        """
        if isinstance(ids, torch.fx.Proxy):
            return leaf_call(self, ids)
        if not isinstance(ids, torch.Tensor) or ids.layout != torch.strided:
            self._checked(self.name, ids)
        rows = super().forward({self.name: ids.reshape(-1)})[self.name]
        return rows.view(*ids.shape, self.dim)


@typed
class HashEmbeddingBag(HashEmbeddingCollection):
    """`torch.nn.EmbeddingBag` over any int64 ids: the sum or mean of the rows of each bag.

    Args:
        dim, optimizer, name, scale, policy, options: see `HashEmbedding`.
        pooling: ``"sum"`` or ``"mean"``; an empty bag gives zeros.
        include_last_offset: offsets (m + 1,) end with the number of ids; by default (m,), as in torch.
    """

    def __init__(
        self,
        dim: int,
        pooling: Literal["sum", "mean"] = "mean",
        optimizer: RowOptimizer | None = None,
        *,
        name: str = "embedding",
        scale: float | None = None,
        policy: TablePolicy | None = None,
        placement: Placement | None = None,
        include_last_offset: bool = False,
        **options: Any,
    ):
        feature = _only_feature(name, dim, pooling, scale, policy)
        super().__init__([feature], optimizer, placement=placement, **options)
        self.name, self.include_last_offset = name, include_last_offset

    def forward(  # type: ignore[override]
        self, ids: Any, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Embeddings (m, dim) float32 of m bags.

        Args:
            ids: (n,) int64 with `offsets`, (m, k) without: bags of k ids; or a `KeyedJaggedTensor` with one
                key, whose samples are the bags.
            offsets: (m,) int64, where bags begin; see `include_last_offset`.
            per_sample_weights: float32 in the shape of `ids`, which multiply their rows; needs ``"sum"``.

        Raises TypeError or ValueError as `HashEmbeddingCollection` does, and for offsets that do not fit.
        """
        if isinstance(ids, torch.fx.Proxy):
            return leaf_call(self, ids, offsets, per_sample_weights)
        if not (isinstance(ids, torch.Tensor | KeyedJaggedTensor) or hasattr(ids, "variable_stride_per_key")):
            kind = type(ids).__name__
            raise TypeError(f"ids of {self.name!r} must be an int64 tensor, got {kind}: torch.as_tensor(ids)")
        if offsets is not None and (
            not isinstance(offsets, torch.Tensor) or offsets.dtype not in (torch.int32, torch.int64)
        ):
            got = offsets.dtype if isinstance(offsets, torch.Tensor) else type(offsets).__name__
            raise TypeError(f"offsets of {self.name!r} must be an int64 tensor, got {got}")
        if not isinstance(ids, torch.Tensor):
            if per_sample_weights is not None:
                raise ValueError("a KeyedJaggedTensor has weights of its own: leave out per_sample_weights")
            return super().forward({self.name: _only_key(ids)})[self.name]
        if per_sample_weights is not None and per_sample_weights.shape != ids.shape:
            raise ValueError(
                f"per_sample_weights must have the shape of ids, {tuple(ids.shape)}, got "
                f"{tuple(per_sample_weights.shape)}"
            )
        if ids.dim() == 2 and offsets is None:
            m, k = ids.shape
            offsets = torch.arange(m + 1, dtype=torch.int64, device=ids.device) * k
        elif ids.dim() != 1 or offsets is None:
            raise ValueError(
                f"bags are ids (n,) with offsets, or ids (m, k) without; got ids {tuple(ids.shape)} "
                f"{'without' if offsets is None else 'with'} offsets"
            )
        elif not self.include_last_offset:
            offsets = torch.cat([offsets.long(), offsets.new_full((1,), len(ids), dtype=torch.int64)])
        flat, offsets = ids.reshape(-1), offsets.long()
        lookup: Lookup | WeightedLookup = Lookup(flat, offsets)
        if per_sample_weights is not None:
            lookup = WeightedLookup(flat, offsets, per_sample_weights.reshape(-1))
        return super().forward({self.name: lookup})[self.name]


def _only_feature(
    name: str, dim: int, pooling: Pooling, scale: float | None, policy: TablePolicy | None
) -> FeatureConfig:
    return FeatureConfig(name, dim, pooling=pooling, scale=scale, policy=policy or TablePolicy())


def _only_key(features: Any) -> Lookup | WeightedLookup:
    """The ids, offsets and weights of a jagged tensor with one key."""
    if not isinstance(features, KeyedJaggedTensor):
        features = KeyedJaggedTensor.from_torchrec(features)
    if len(features.keys) != 1:
        raise ValueError(
            f"one table takes one key, got {list(features.keys)}: use HashEmbeddingCollection for several"
        )
    return features[features.keys[0]]
