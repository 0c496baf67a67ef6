"""Dynamic tables, the features that look them up, and the optimizers of their rows."""

from .features import FeatureConfig, HashTableCollection, KeyLayout, TableGroup
from .optimizer import DenseOptimizer, OptimizerName, RowOptimizer
from .policy import Eviction, Heat, TablePolicy
from .table import DynamicTable

__all__ = [
    "DenseOptimizer",
    "DynamicTable",
    "Eviction",
    "FeatureConfig",
    "HashTableCollection",
    "Heat",
    "KeyLayout",
    "OptimizerName",
    "RowOptimizer",
    "TableGroup",
    "TablePolicy",
]
