"""Modules over the ops, and the accumulator that makes their gradients exact."""

from ..ops import GradientAccumulator
from .attention import MultiheadAttention, TransformerEncoderLayer, scaled_dot_product_attention
from .context import jagged, padded, record, samples
from .conversion import Conversion, convert
from .dlrm import DLRM, DLRMConfig, partition_tables
from .exact import expand
from .fuxi import FuXi, FuXiConfig, FuXiLayer
from .grm import GRM, GRM_SIZES, GRMConfig
from .hstu import HSTU, HSTUConfig, HSTULayer
from .hstu_layer import RECOMPUTED
from .layers import GELU, Dropout, Embedding, LayerNorm, Linear, PReLU, RMSNorm, Sigmoid, SiLU
from .losses import binary_cross_entropy, in_batch_softmax, sigmoid
from .mmoe import MMoE
from .modules import (
    MLP,
    GatedMLP,
    GatedNorm,
    PositionalEmbedding,
    RelativeAggregate,
    RelativeBias,
    TokenDropout,
)
from .next_item import LayerConfig, NextItemModel
from .padding import Padded, PaddedNextItem, pad, unpad
from .sasrec import SASRec, SASRecConfig, SASRecLayer
from .sequence import GRU, Conv1d
from .tokens import Tokens, sum_by_sample

__all__ = [
    "DLRM",
    "GELU",
    "GRM",
    "GRM_SIZES",
    "GRU",
    "HSTU",
    "MLP",
    "RECOMPUTED",
    "Conv1d",
    "Conversion",
    "DLRMConfig",
    "Dropout",
    "Embedding",
    "FuXi",
    "FuXiConfig",
    "FuXiLayer",
    "GRMConfig",
    "GatedMLP",
    "GatedNorm",
    "GradientAccumulator",
    "HSTUConfig",
    "HSTULayer",
    "LayerConfig",
    "LayerNorm",
    "Linear",
    "MMoE",
    "MultiheadAttention",
    "NextItemModel",
    "PReLU",
    "Padded",
    "PaddedNextItem",
    "PositionalEmbedding",
    "RMSNorm",
    "RelativeAggregate",
    "RelativeBias",
    "SASRec",
    "SASRecConfig",
    "SASRecLayer",
    "SiLU",
    "Sigmoid",
    "TokenDropout",
    "Tokens",
    "TransformerEncoderLayer",
    "binary_cross_entropy",
    "convert",
    "expand",
    "in_batch_softmax",
    "jagged",
    "pad",
    "padded",
    "partition_tables",
    "record",
    "samples",
    "scaled_dot_product_attention",
    "sigmoid",
    "sum_by_sample",
    "unpad",
]
