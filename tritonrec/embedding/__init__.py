"""Dynamic tables, the features that look them up, and the optimizers of their rows."""

from .features import FeatureConfig, HashTableCollection, TableGroup
from .interface import EmbeddingTable
from .key_layout import KeyLayout
from .optimizer import DenseOptimizer, OptimizerName, RowOptimizer
from .policy import Eviction, Placement, PrecisionTiers, Storage, TablePolicy
from .table import DynamicTable

__all__ = [
    "DenseOptimizer",
    "DynamicTable",
    "EmbeddingTable",
    "Eviction",
    "FeatureConfig",
    "HashTableCollection",
    "KeyLayout",
    "OptimizerName",
    "Placement",
    "PrecisionTiers",
    "RowOptimizer",
    "Storage",
    "TableGroup",
    "TablePolicy",
]
