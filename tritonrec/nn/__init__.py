"""Modules over the ops, and the grids that make their gradients exact."""

from .exact import attach_grids, detach_grids, has_grid, sum_by_sample
from .hstu import HSTU, HSTUConfig, HSTULayer
from .modules import GatedNorm, LayerNorm, Linear, PositionalEmbedding

__all__ = [
    "HSTU",
    "GatedNorm",
    "HSTUConfig",
    "HSTULayer",
    "LayerNorm",
    "Linear",
    "PositionalEmbedding",
    "attach_grids",
    "detach_grids",
    "has_grid",
    "sum_by_sample",
]
