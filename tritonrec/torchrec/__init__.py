"""TorchRec's names over our tables: its collections, configurations and fused modules."""

from .collections import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedTensor,
    PoolingType,
)
from .fused import FusedEmbeddingBagCollection, FusedEmbeddingCollection

__all__ = [
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingCollection",
    "JaggedTensor",
    "KeyedTensor",
    "PoolingType",
]
