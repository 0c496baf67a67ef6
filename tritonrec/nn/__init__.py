"""Modules over the ops, and the accumulator that makes their gradients exact."""

from ..ops import GradientAccumulator
from .dlrm import DLRM, DLRMConfig, partition_tables
from .fuxi import FuXi, FuXiConfig, FuXiLayer
from .grm import GRM, GRMConfig
from .hstu import HSTU, HSTUConfig, HSTULayer
from .hstu_layer import RECOMPUTED
from .losses import binary_cross_entropy, sigmoid
from .mmoe import MMoE
from .modules import (
    MLP,
    GatedMLP,
    GatedNorm,
    LayerNorm,
    Linear,
    PositionalEmbedding,
    RelativeAggregate,
    RelativeBias,
)
from .next_item import LayerConfig, NextItemModel
from .tokens import Tokens, sum_by_sample

__all__ = [
    "DLRM",
    "GRM",
    "HSTU",
    "MLP",
    "RECOMPUTED",
    "DLRMConfig",
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
    "NextItemModel",
    "PositionalEmbedding",
    "RelativeAggregate",
    "RelativeBias",
    "Tokens",
    "binary_cross_entropy",
    "partition_tables",
    "sigmoid",
    "sum_by_sample",
]
