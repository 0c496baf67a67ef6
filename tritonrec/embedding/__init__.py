"""Dynamic tables, the features that look them up, and the optimizers of their rows."""

from .features import FeatureConfig, HashTableCollection, TableGroup
from .interface import EmbeddingTable
from .key_layout import KeyLayout
from .learning_rate import Constant, Schedule, StepDecay, WarmupCosine, WarmupLinear
from .policy import Eviction, Placement, PrecisionTiers, Storage, TablePolicy
from .row_optimizer import OptimizerName, RowOptimizer
from .table import DynamicTable

__all__ = [
    "Constant",
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
    "Schedule",
    "StepDecay",
    "Storage",
    "TableGroup",
    "TablePolicy",
    "WarmupCosine",
    "WarmupLinear",
]
