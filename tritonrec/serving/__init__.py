"""Serving: models exported from checkpoints, and table-wise inference with bounded-lag lookups."""

from .exporter import export, load_weights
from .inference import ServedModel, infer
from .predictor import ExportedTable, Predictor
from .retrieval import recall, top_k
from .tables import TableWiseDLRM, own_samples

__all__ = [
    "ExportedTable",
    "Predictor",
    "ServedModel",
    "TableWiseDLRM",
    "export",
    "infer",
    "load_weights",
    "own_samples",
    "recall",
    "top_k",
]
