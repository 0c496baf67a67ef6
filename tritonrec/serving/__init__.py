"""Inference with table-wise sharding and bounded-lag lookups."""

from .inference import ServedModel, infer
from .tables import TableWiseDLRM, own_samples

__all__ = ["ServedModel", "TableWiseDLRM", "infer", "own_samples"]
