"""Dynamic tables, the features that look them up, and the optimizers of their rows."""

from .features import FeatureConfig, HashTableCollection, TableGroup
from .hash_optimizer import HashOptimizer
from .key_layout import KeyLayout
from .learning_rate import Constant, Schedule, StepDecay, WarmupCosine, WarmupLinear
from .modules import HashEmbeddingCollection
from .policy import Eviction, Placement, PrecisionTiers, Storage, TablePolicy
from .row_gradients import RowsParameter
from .row_optimizer import OptimizerName, RowOptimizer
from .single_table import HashEmbedding, HashEmbeddingBag
from .stored_table import StoredTable
from .table import DynamicTable
from .warm_start import WarmStart, load_table_weights

__all__ = [
    "Constant",
    "DynamicTable",
    "Eviction",
    "FeatureConfig",
    "HashEmbedding",
    "HashEmbeddingBag",
    "HashEmbeddingCollection",
    "HashOptimizer",
    "HashTableCollection",
    "KeyLayout",
    "OptimizerName",
    "Placement",
    "PrecisionTiers",
    "RowOptimizer",
    "RowsParameter",
    "Schedule",
    "StepDecay",
    "Storage",
    "StoredTable",
    "TableGroup",
    "TablePolicy",
    "WarmStart",
    "WarmupCosine",
    "WarmupLinear",
    "load_table_weights",
]
