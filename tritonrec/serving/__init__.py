"""Inference with tables spread over ranks, whose lookups travel with a bounded lag."""

from .inference import ServedModel, infer
from .tables import TableWiseDLRM, own_samples

__all__ = ["ServedModel", "TableWiseDLRM", "infer", "own_samples"]
