"""Dynamic tables, the features that look them up, and the optimizers of their rows."""

from .features import FeatureConfig, HashTableCollection, TableGroup
from .hash_optimizer import HashOptimizer
from .interface import EmbeddingTable
from .key_layout import KeyLayout
from .learning_rate import Constant, Schedule, StepDecay, WarmupCosine, WarmupLinear
from .modules import HashEmbeddingCollection
from .policy import Eviction, Placement, PrecisionTiers, Storage, TablePolicy
from .row_optimizer import OptimizerName, RowOptimizer
from .rows_parameter import RowsParameter
from .single_table import HashEmbedding, HashEmbeddingBag
from .table import DynamicTable
from .torchrec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedTensor,
    PoolingType,
)
from .torchrec_fused import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from .warm_start import WarmStart, load_table_weights

__all__ = [
    "Constant",
    "DataType",
    "DynamicTable",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "EmbeddingTable",
    "Eviction",
    "FeatureConfig",
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingCollection",
    "HashEmbedding",
    "HashEmbeddingBag",
    "HashEmbeddingCollection",
    "HashOptimizer",
    "HashTableCollection",
    "JaggedTensor",
    "KeyLayout",
    "KeyedTensor",
    "OptimizerName",
    "Placement",
    "PoolingType",
    "PrecisionTiers",
    "RowOptimizer",
    "RowsParameter",
    "Schedule",
    "StepDecay",
    "Storage",
    "TableGroup",
    "TablePolicy",
    "WarmStart",
    "WarmupCosine",
    "WarmupLinear",
    "load_table_weights",
]
