"""Dynamic tables and the optimizers of their rows."""

from .optimizer import DenseOptimizer, OptimizerName, RowOptimizer
from .table import DynamicTable

__all__ = ["DenseOptimizer", "DynamicTable", "OptimizerName", "RowOptimizer"]
